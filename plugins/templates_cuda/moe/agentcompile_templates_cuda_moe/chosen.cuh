// The experts of the slots, as every layer of them finds out: read from `experts`, or, where the router lies in front (P::routed), chosen
// by each block itself from its logits, which takes less than a launch and what waits for it.
#pragma once
#include "routing.cuh"

namespace {

// Operands of a router in front; absent ones are null. `count`: experts that there are.
template <class P> struct Router {
  const typename P::Logit* logits;
  const typename P::RouterBias* bias;
  typename P::Score* scores;
  long long* choice;
  int count;
  float eps;
  float factor;
};

// The expert of slot `lane`, -1 where there is no such slot. By a whole warp, behind the dependency wait. The one warp of the grid for
// which `tells` also writes choice and scores, for what follows.
template <class P>
__device__ __forceinline__ long long expert_of_slot(const Router<P>& router, const long long* experts, int slots, int lane, bool tells) {
  if constexpr (P::routed) {
    Routing<P> routing;
    routing.prefetch(router.bias, router.count, lane);
    const Choice found = routing.choose(router.logits, slots, router.eps, router.factor, lane);
    if (tells && lane < slots) {
      router.scores[lane] = ac::from_float<typename P::Score>(found.weight);
      router.choice[lane] = found.expert;
    }
    return found.expert;
  } else {
    return lane < slots ? experts[lane] : -1;
  }
}

// Slots [first, first + count) for all threads of a block: its first warp asks, and a barrier of the block must follow.
template <class P>
__device__ __forceinline__ void share_experts(const Router<P>& router, const long long* experts, int slots, int first, int count,
                                              long long* chosen) {
  if constexpr (P::routed) {
    if (threadIdx.x >= ac::warp_size) return;
    const long long expert = expert_of_slot(router, experts, slots, threadIdx.x, blockIdx.x == 0 && blockIdx.y == 0);
    const int place = static_cast<int>(threadIdx.x) - first;
    if (place >= 0 && place < count) chosen[place] = expert;
  } else {
    if (threadIdx.x < count) chosen[threadIdx.x] = experts[first + threadIdx.x];
  }
}

}  // namespace
