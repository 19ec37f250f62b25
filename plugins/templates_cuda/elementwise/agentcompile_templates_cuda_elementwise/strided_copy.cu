// A part of a tensor in one piece: out[i] = in[offset + i0 * stride0 + i1 * stride1 + i2 * stride2 + i3 * stride3], where
// (i0, i1, i2, i3) are the digits of i for the extents of the part, the last one running fastest.
//
// in: any tensor that holds the part; out [count]. One thread per element.
// Wins over the framework only by being part of the captured chain: it moves a few kilobytes.
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include "plan.cuh"

extern "C" __global__ void __launch_bounds__(Plan::threads)
strided_copy_kernel(const Plan::A* in, Plan::T* out, long long count, long long offset, int extent1, int extent2, int extent3,
                    long long stride0, long long stride1, long long stride2, long long stride3) {
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const long long i = static_cast<long long>(blockIdx.x) * Plan::threads + threadIdx.x;
  if (i >= count) return;
  const long long rows = i / extent3;
  const long long planes = rows / extent2;
  const long long place = offset + (i % extent3) * stride3 + (rows % extent2) * stride2 + (planes % extent1) * stride1 +
                          (planes / extent1) * stride0;
  out[i] = ac::from_float<Plan::T>(ac::to_float(in[place]));
}
