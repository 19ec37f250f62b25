// The router of a mixture of experts for one token: the slots best experts, best first, and their weights.
//
// logits [count]; bias [count]; scores [slots]; experts [slots]. What is computed: see routing.cuh. One warp.
// Wins over one operator after the other: scores, a topk that sorts, a sum and a division are four launches for a few hundred numbers.
#include <agentcompile/ptx.cuh>
#include "plan.cuh"  // struct Plan: Logit, RouterBias, Score, held, over_chosen, sigmoid, biased, floored, pdl
#include "routing.cuh"

extern "C" __global__ void __launch_bounds__(32)
router_kernel(const Plan::Logit* logits, const Plan::RouterBias* bias, Plan::Score* scores, long long* experts, int count, int slots,
              float eps, float factor) {
  if (Plan::pdl) ac::launch_dependents();
  const int lane = threadIdx.x;
  Routing<Plan> routing;
  routing.prefetch(bias, count, lane);
  ac::grid_dependency_wait();
  const Choice choice = routing.choose(logits, slots, eps, factor, lane);
  if (lane >= slots) return;
  scores[lane] = ac::from_float<Plan::Score>(choice.weight);
  experts[lane] = choice.expert;
}
