// Rotary position embedding of the heads of one position: out = x with its first rotary_dim elements rotated in pairs.
//
// x, out [heads, head_dim] contiguous and distinct; cos, sin [rotary_dim], indexed by element (for the half layout each
// frequency stands twice, as HuggingFace builds them). Products and sum in fp32, rounded once. One thread per element.
// Wins only where attention does not rotate q and k itself.
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/row.cuh>
#include "plan.cuh"

extern "C" __global__ void __launch_bounds__(Plan::threads)
rope_kernel(const Plan::T* x, const Plan::T* cos, const Plan::T* sin, Plan::T* out, int heads, int head_dim, int rotary_dim) {
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const int i = blockIdx.x * Plan::threads + threadIdx.x;
  if (i >= heads * head_dim) return;
  const int element = i % head_dim;
  float value = ac::to_float(x[i]);
  if (element < rotary_dim) {
    const ac::RopePartner partner = ac::rope_partner<Plan::interleaved>(element, rotary_dim);
    value = ac::rope_rotate(value, ac::to_float(x[i - element + partner.index]), ac::to_float(cos[element]),
                            ac::to_float(sin[element]), partner.upper);
  }
  out[i] = ac::from_float<Plan::T>(value);
}
