// Heads of one position, put together of channels that are rotated in pairs and others that are copied.
//
// out [heads, head_dim] contiguous and distinct from all else: channels first .. first + rotary_dim of head h are the rotation of
// x[x_first + h * x_step ..] (with Plan::apart read with every second channel first), the others are those of
// rest[rest_first + h * rest_step ..], or of x where there is no rest; a step of 0 gives all heads the same. cos, sin [rotary_dim],
// by element (for the half layout each frequency stands twice, as HuggingFace builds them). Products and sum in fp32, rounded once.
// One thread per element. Wins where attention does not rotate q and k itself: where a head has a part that is not rotated
// before the one that is, as in latent attention, it replaces a copy, the rotation and a concatenation.
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/row.cuh>
#include "plan.cuh"

namespace {

// Where the rotation's element lies in its head.
__device__ __forceinline__ int channel_of(int element, int rotary_dim) {
  if constexpr (!Plan::apart) return element;
  const int half = rotary_dim / 2;
  return element < half ? 2 * element : 2 * (element - half) + 1;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
rope_kernel(const Plan::T* x, const Plan::T* rest, const Plan::Table* cos, const Plan::Table* sin, Plan::Out* out, int heads,
            int head_dim, int rotary_dim, int first, int x_first, int x_step, int rest_first, int rest_step) {
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const int i = blockIdx.x * Plan::threads + threadIdx.x;
  if (i >= heads * head_dim) return;
  const int head = i / head_dim;
  const int element = i % head_dim - first;
  float value;
  if (element >= 0 && element < rotary_dim) {
    const Plan::T* turned = x + x_first + head * x_step;
    const ac::RopePartner partner = ac::rope_partner<Plan::interleaved>(element, rotary_dim);
    value = ac::rope_rotate(ac::to_float(turned[channel_of(element, rotary_dim)]),
                            ac::to_float(turned[channel_of(partner.index, rotary_dim)]), ac::to_float(cos[element]),
                            ac::to_float(sin[element]), partner.upper);
  } else {
    const Plan::T* kept = (Plan::has_rest ? rest : x) + rest_first + head * rest_step;
    value = ac::to_float(kept[element < 0 ? element + first : element + first - rotary_dim]);
  }
  out[i] = ac::from_float<Plan::Out>(value);
}
