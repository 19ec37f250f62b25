// Pools of windows: out[o, i0, i1, i2] = largest, or mean, of x[o, ik * stepk - padk + jk * apartk] over the jk of the window.
//
// x [outer, extent0, extent1, extent2] is the plan's expression over in0, in1, in2; out [outer, made0, made1, made2]. A thread makes
// Plan::items results that lie a block apart, so that a warp's results, and what it loads for one place of the window, lie side by side;
// what windows share comes from L1. All sizes are constants, so that places are found without divisions.
// Wins wherever windows are small: then every element is brought once.
#include "plan.cuh"
#include <agentcompile/dtype.cuh>
#include <agentcompile/inputs.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>

namespace {

using Elements = ac::Inputs<Epilogue, ac::Input<Plan::kind_0, Plan::A0>, ac::Input<Plan::kind_1, Plan::A1>, ac::Input<Plan::kind_2, Plan::A2>>;
constexpr int plane = Plan::made0 * Plan::made1 * Plan::made2;

__device__ __forceinline__ float take(float own, float other) {
  if constexpr (Plan::largest) return ac::is_nan(own) || own > other ? own : other;
  return own + other;
}

__device__ __forceinline__ float window(const Elements& elements, long long outer, int place) {
  const int first0 = place / (Plan::made1 * Plan::made2) * Plan::step0 - Plan::pad0;
  const int first1 = place / Plan::made2 % Plan::made1 * Plan::step1 - Plan::pad1;
  const int first2 = place % Plan::made2 * Plan::step2 - Plan::pad2;
  float found = Plan::largest ? __int_as_float(static_cast<int>(0xff800000u)) : 0.0f;  // minus infinity, or nothing
  int inside = 0;
#pragma unroll Plan::unroll0
  for (int j0 = 0; j0 < Plan::window0; ++j0) {
    const int i0 = first0 + j0 * Plan::apart0;
    if (i0 < 0 || i0 >= Plan::extent0) continue;
#pragma unroll Plan::unroll1
    for (int j1 = 0; j1 < Plan::window1; ++j1) {
      const int i1 = first1 + j1 * Plan::apart1;
      if (i1 < 0 || i1 >= Plan::extent1) continue;
      const long long line = ((outer * Plan::extent0 + i0) * Plan::extent1 + i1) * Plan::extent2;
#pragma unroll Plan::unroll2
      for (int j2 = 0; j2 < Plan::window2; ++j2) {
        const int i2 = first2 + j2 * Plan::apart2;
        if (i2 < 0 || i2 >= Plan::extent2) continue;
        found = take(found, elements.element(line + i2));
        ++inside;
      }
    }
  }
  if constexpr (Plan::largest) return found;
  return found / static_cast<float>(Plan::divisor > 0 ? Plan::divisor : inside);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
pool_kernel(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, Plan::T* out, long long results, long long period0,
            long long period1, long long period2) {
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const Elements elements{{in0, period0}, {in1, period1}, {in2, period2}};
  const long long first = static_cast<long long>(blockIdx.x) * (Plan::threads * Plan::items) + threadIdx.x;
#pragma unroll
  for (int item = 0; item < Plan::items; ++item) {
    const long long result = first + item * Plan::threads;
    if (result < results) out[result] = ac::from_float<Plan::T>(window(elements, result / plane, static_cast<int>(result % plane)));
  }
}
