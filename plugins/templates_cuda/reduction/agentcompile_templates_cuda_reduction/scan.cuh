// What the kernels of running sums and products share: the elements in the order they are run through, how two runs join, the store.
//
// Element number i of a line is x[i], or the i-th from the end where Plan::reverse; a result takes the place of its element.
// All in fp32; every order of joining is fixed by the kernel, and what lies behind an element is in no join of it.
#pragma once
#include <agentcompile/dtype.cuh>
#include <agentcompile/inputs.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>

namespace {

using Elements = ac::Inputs<Epilogue, ac::Input<Plan::kind_0, Plan::A0>, ac::Input<Plan::kind_1, Plan::A1>, ac::Input<Plan::kind_2, Plan::A2>>;
constexpr int step = Plan::step;
constexpr float neutral = Plan::product ? 1.0f : 0.0f;

__device__ __forceinline__ Elements elements_of(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, long long period0,
                                                long long period1, long long period2) {
  return Elements{{in0, period0}, {in1, period1}, {in2, period2}};
}

__device__ __forceinline__ float join(float before, float after) { return Plan::product ? before * after : before + after; }

}  // namespace
