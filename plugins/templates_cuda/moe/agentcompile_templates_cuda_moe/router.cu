// The router of a mixture of experts for one token: the slots best experts, best first, and their weights.
//
// logits [count]; experts [slots]: the first index among equals, NaN counting as the largest, as torch.topk takes it; scores [slots].
// Plain: the largest logits, and exp(logit - largest) over its sum over all logits, or, if Plan::over_chosen, over the chosen ones.
// Plan::sigmoid or Plan::biased: every logit becomes its score, its sigmoid or its part of the softmax over all; the largest scores
// plus bias [count] are chosen; the weights are the scores alone, if Plan::over_chosen over their sum plus eps (Plan::floored: over
// their sum, at least eps). All times factor. One warp: lane l holds logits l, l + 32, ... in registers and finishes slot l.
// Wins over one operator after the other: scores, a topk that sorts, a sum and a division are four launches for a few hundred numbers.
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>
#include "plan.cuh"  // struct Plan: T, Bias, Score, held, over_chosen, sigmoid, biased, floored, pdl

namespace {

constexpr bool scored = Plan::sigmoid || Plan::biased;  // what is chosen are scores, not logits

constexpr unsigned int no_key = 0;  // loses against every logit, at an index behind all others

// The logit of a key, as far as its size is concerned.
__device__ __forceinline__ float value_of(unsigned int key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// The best of what this warp holds and has not taken.
__device__ __forceinline__ ac::KeyIndex best_of(const unsigned int (&keys)[Plan::held], unsigned taken, int lane) {
  ac::KeyIndex best{no_key, 0x7fffffff};
#pragma unroll
  for (int i = 0; i < Plan::held; ++i) {
    if (!(taken >> i & 1u) && keys[i] > best.key) best = ac::KeyIndex{keys[i], i * ac::warp_size + lane};
  }
  return ac::warp_first_maximum(best);
}

// The sum of exp(logit - largest) over all logits.
__device__ __forceinline__ float total_of(const float (&values)[Plan::held], unsigned missing, float largest) {
  float part = 0.0f;
#pragma unroll
  for (int i = 0; i < Plan::held; ++i) {
    if (!(missing >> i & 1u)) part += expf(values[i] - largest);
  }
  return ac::warp_sum(part);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32)
router_kernel(const Plan::T* logits, const Plan::Bias* bias, Plan::Score* scores, long long* experts, int count, int slots, float eps,
              float factor) {
  if (Plan::pdl) ac::launch_dependents();
  const int lane = threadIdx.x;
  float biases[Plan::held];
  unsigned missing = 0;  // bit i: there is no such logit
#pragma unroll
  for (int i = 0; i < Plan::held; ++i) {
    const int index = i * ac::warp_size + lane;
    biases[i] = Plan::biased && index < count ? ac::to_float(bias[index]) : 0.0f;
    if (index >= count) missing |= 1u << i;
  }
  ac::grid_dependency_wait();
  float values[Plan::held], chances[Plan::held];  // what is chosen by; what a chosen one weighs
#pragma unroll
  for (int i = 0; i < Plan::held; ++i) {
    values[i] = missing >> i & 1u ? 0.0f : ac::to_float(logits[i * ac::warp_size + lane]);
  }
  unsigned int keys[Plan::held];
  const auto order = [&]() {
#pragma unroll
    for (int i = 0; i < Plan::held; ++i) keys[i] = ac::order_key(values[i]);
  };
  order();
  float largest = 0.0f;
  if constexpr (!Plan::sigmoid) largest = value_of(best_of(keys, missing, lane).key);
  if constexpr (scored) {
    const float whole = Plan::sigmoid ? 1.0f : total_of(values, missing, largest);
#pragma unroll
    for (int i = 0; i < Plan::held; ++i) {
      chances[i] = Plan::sigmoid ? ac::sigmoid(values[i]) : expf(values[i] - largest) / whole;
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
      for (int i = 0; i < Plan::held; ++i) chance = best.index / ac::warp_size == i ? chances[i] : chance;
      chance = __shfl_sync(ac::full_warp, chance, best.index % ac::warp_size);
      if (slot == lane) weight = chance;
    }
  }
  if constexpr (!scored) weight = lane < slots ? expf(value_of(mine.key) - largest) : 0.0f;
  float total = 1.0f;
  if constexpr (Plan::over_chosen) {
    total = ac::warp_sum(weight);
    if constexpr (scored) total = Plan::floored ? fmaxf(total, eps) : total + eps;
  } else if constexpr (!scored) {
    total = total_of(values, missing, largest);
  }
  if (lane >= slots) return;
  scores[lane] = ac::from_float<Plan::Score>(weight / total * factor);
  experts[lane] = mine.index;
}
