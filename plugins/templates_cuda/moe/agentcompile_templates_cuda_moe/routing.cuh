// The choice of experts for one token by one warp: the slots best experts, best first, and their weights.
//
// logits [count]; the first index among equals is chosen, NaN counting as the largest, as torch.topk takes it.
// Plain: the largest logits, and exp(logit - largest) over its sum over all logits, or, if P::over_chosen, over the chosen ones.
// P::sigmoid or P::biased: every logit becomes its score, its sigmoid or its part of the softmax over all; the largest scores
// plus bias [count] are chosen; the weights are the scores alone, if P::over_chosen over their sum plus eps (P::floored: over
// their sum, at least eps). All times factor. Lane l holds logits l, l + 32, ... (P::held of them) in registers and finishes slot l.
#pragma once
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>
#include <agentcompile/reduce.cuh>

namespace {

// Of slot `lane`; lanes without a slot have the expert -1.
struct Choice {
  long long expert;
  float weight;
};

template <class P> struct Routing {
  static constexpr bool scored = P::sigmoid || P::biased;  // what is chosen are scores, not logits
  static constexpr unsigned int no_key = 0;                // loses against every logit, at an index behind all others

  float biases[P::held];
  unsigned missing;  // bit i: there is no such logit

  // What may be read before the grid dependency wait.
  __device__ __forceinline__ void prefetch(const typename P::RouterBias* bias, int count, int lane) {
    missing = 0;
#pragma unroll
    for (int i = 0; i < P::held; ++i) {
      const int index = i * ac::warp_size + lane;
      biases[i] = P::biased && index < count ? ac::to_float(bias[index]) : 0.0f;
      if (index >= count) missing |= 1u << i;
    }
  }

  // The logit of a key, as far as its size is concerned.
  static __device__ __forceinline__ float value_of(unsigned int key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
  }

  // The best of what this warp holds and has not taken.
  static __device__ __forceinline__ ac::KeyIndex best_of(const unsigned int (&keys)[P::held], unsigned taken, int lane) {
    ac::KeyIndex best{no_key, 0x7fffffff};
#pragma unroll
    for (int i = 0; i < P::held; ++i) {
      if (!(taken >> i & 1u) && keys[i] > best.key) best = ac::KeyIndex{keys[i], i * ac::warp_size + lane};
    }
    return ac::warp_first_maximum(best);
  }

  // The sum of exp(logit - largest) over all logits.
  __device__ __forceinline__ float total_of(const float (&values)[P::held], float largest) const {
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < P::held; ++i) {
      if (!(missing >> i & 1u)) part += expf(values[i] - largest);
    }
    return ac::warp_sum(part);
  }

  __device__ __forceinline__ Choice choose(const typename P::Logit* logits, int slots, float eps, float factor, int lane) const {
    float values[P::held], chances[P::held];  // what is chosen by; what a chosen one weighs
#pragma unroll
    for (int i = 0; i < P::held; ++i) {
      values[i] = missing >> i & 1u ? 0.0f : ac::to_float(logits[i * ac::warp_size + lane]);
    }
    unsigned int keys[P::held];
    const auto order = [&]() {
#pragma unroll
      for (int i = 0; i < P::held; ++i) keys[i] = ac::order_key(values[i]);
    };
    order();
    float largest = 0.0f;
    if constexpr (!P::sigmoid) largest = value_of(best_of(keys, missing, lane).key);
    if constexpr (scored) {
      const float whole = P::sigmoid ? 1.0f : total_of(values, largest);
#pragma unroll
      for (int i = 0; i < P::held; ++i) {
        chances[i] = P::sigmoid ? ac::sigmoid(values[i]) : expf(values[i] - largest) / whole;
        values[i] = chances[i] + biases[i];
      }
      order();
    }
    unsigned taken = missing;
    ac::KeyIndex mine{no_key, 0};
    float weight = 0.0f;
    for (int slot = 0; slot < slots; ++slot) {
      const ac::KeyIndex best = best_of(keys, taken, lane);
      if (best.index % ac::warp_size == lane) taken |= 1u << (best.index / ac::warp_size);
      if (slot == lane) mine = best;
      if constexpr (scored) {
        float chance = 0.0f;
#pragma unroll
        for (int i = 0; i < P::held; ++i) chance = best.index / ac::warp_size == i ? chances[i] : chance;
        chance = __shfl_sync(ac::full_warp, chance, best.index % ac::warp_size);
        if (slot == lane) weight = chance;
      }
    }
    if constexpr (!scored) weight = lane < slots ? expf(value_of(mine.key) - largest) : 0.0f;
    float total = 1.0f;
    if constexpr (P::over_chosen) {
      total = ac::warp_sum(weight);
      if constexpr (scored) total = P::floored ? fmaxf(total, eps) : total + eps;
    } else if constexpr (!scored) {
      total = total_of(values, largest);
    }
    return lane < slots ? Choice{mine.index, weight / total * factor} : Choice{-1, 0.0f};
  }
};

}  // namespace
