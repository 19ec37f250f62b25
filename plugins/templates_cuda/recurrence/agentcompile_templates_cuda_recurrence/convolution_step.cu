// One token of a short causal convolution and the last columns that the next token reads, in place:
//
//   out[c] = act(sum over k of weight[c, k] column[c, k] + bias[c])     column[c] = state[c, 1 ..], x[c];  state[c] = column[c]
//
// state and weight [channels, width], x and out [channels], bias [channels] or null. fp32 sums, rounded before the activation as the
// framework rounds them. A thread has Plan::each channels: those of 16 bytes of state where whole channels fit (Plan::quads), else one,
// element by element. With Plan::early the state is read before the dependency wait: this kernel wrote it a token ago
// (docs/decisions/0048); weights always are.
// Wins over the framework's operators by their launches.
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>

#include "plan.cuh"

namespace {

using T = Plan::T;
constexpr int width = Plan::width, each = Plan::each, count = width * each;
static_assert(!Plan::quads || count * sizeof(T) == 16, "16 bytes");
static_assert(Plan::quads || !Plan::early, "what is read early is read by 16 bytes");
using Vector = ac::Vec16<T>;

// Neighbours, which lie at a multiple of 16 bytes where that is how they are moved.
template <int Count, class Load> __device__ __forceinline__ void load_all(float (&to)[Count], const T* from, Load load) {
  if constexpr (Plan::quads && Count == Vector::size) {
    Vector{load(from)}.unpack(to);
  } else {
#pragma unroll
    for (int i = 0; i < Count; ++i) to[i] = ac::to_float(from[i]);
  }
}
template <int Count> __device__ __forceinline__ void store_all(T* to, const float (&from)[Count]) {
  if constexpr (Plan::quads && Count == Vector::size) {
    Vector::pack(from).store(to);
  } else {
#pragma unroll
    for (int i = 0; i < Count; ++i) to[i] = ac::from_float<T>(from[i]);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
convolution_step_kernel(Plan::T* state, const Plan::T* x, const Plan::T* weight, const Plan::T* bias, Plan::T* out, int channels) {
  if (Plan::pdl) ac::launch_dependents();
  const int first = (blockIdx.x * Plan::threads + threadIdx.x) * each;
  const bool is_here = first < channels;
  const auto settled = [](const T* from) { return ac::load_settled16(from); };
  const auto plain = [](const T* from) { return ac::load_stream16(from); };
  float weights[count] = {}, columns[count] = {}, added[each] = {};
  if (is_here) {
    load_all(weights, weight + first * width, plain);
#pragma unroll
    for (int c = 0; c < each; ++c) added[c] = Plan::has_bias ? ac::to_float(bias[first + c]) : 0.0f;
    if (Plan::early) load_all(columns, state + first * width, settled);
  }
  ac::grid_dependency_wait();
  if (!is_here) return;
  if (!Plan::early) load_all(columns, state + first * width, plain);
  float kept[count];
#pragma unroll
  for (int c = 0; c < each; ++c) {
    const float newest = ac::to_float(x[first + c]);
    float sum = added[c];
#pragma unroll
    for (int k = 0; k < width; ++k) {
      const float column = k + 1 < width ? columns[c * width + k + 1] : newest;
      kept[c * width + k] = column;
      sum = fmaf(weights[c * width + k], column, sum);
    }
    out[first + c] = ac::from_float<T>(Plan::silu ? ac::silu(ac::round_to<T>(sum)) : sum);
  }
  store_all(state + first * width, kept);
}
