// The router of a mixture of experts for one token: the slots largest logits, largest first, and their softmax.
//
// logits [count]; experts [slots]: the first index among equals, NaN counting as the largest, as torch.topk takes it; scores [slots]:
// exp(logit - largest) over its sum over all logits, or, if Plan::over_chosen, over the chosen ones. One warp: lane l holds logits
// l, l + 32, ... in registers and finishes slot l.
// Wins over one operator after the other: a softmax, a topk that sorts, a sum and a division are four launches for a few hundred numbers.
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>
#include "plan.cuh"  // struct Plan: T, Score, held, over_chosen, pdl

namespace {

// Loses against every logit: minus infinity, at an index behind all others.
__device__ __forceinline__ ac::ValueIndex nothing() {
  return ac::ValueIndex{__int_as_float(static_cast<int>(0xff800000u)), 0x7fffffff};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32)
router_kernel(const Plan::T* logits, Plan::Score* scores, long long* experts, int count, int slots) {
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const int lane = threadIdx.x;
  float values[Plan::held];
  unsigned taken = 0;  // bit i: values[i] is chosen, or there is no such logit
#pragma unroll
  for (int i = 0; i < Plan::held; ++i) {
    const int index = i * ac::warp_size + lane;
    values[i] = index < count ? ac::to_float(logits[index]) : 0.0f;
    if (index >= count) taken |= 1u << i;
  }
  const unsigned missing = taken;
  ac::ValueIndex mine = nothing();
  float largest = 0.0f;
  for (int slot = 0; slot < slots; ++slot) {
    ac::ValueIndex best = nothing();
#pragma unroll
    for (int i = 0; i < Plan::held; ++i) {
      if (!(taken >> i & 1u)) best = ac::first_maximum(best, ac::ValueIndex{values[i], i * ac::warp_size + lane});
    }
    best = ac::warp_first_maximum(best);
    if (best.index % ac::warp_size == lane) taken |= 1u << (best.index / ac::warp_size);
    if (slot == lane) mine = best;
    if (slot == 0) largest = best.value;
  }
  const float weight = lane < slots ? expf(mine.value - largest) : 0.0f;
  float part = weight;
  if constexpr (!Plan::over_chosen) {
    part = 0.0f;
#pragma unroll
    for (int i = 0; i < Plan::held; ++i) {
      if (!(missing >> i & 1u)) part += expf(values[i] - largest);
    }
  }
  const float total = ac::warp_sum(part);
  if (lane >= slots) return;
  scores[lane] = ac::from_float<Plan::Score>(weight / total);
  experts[lane] = mine.index;
}
