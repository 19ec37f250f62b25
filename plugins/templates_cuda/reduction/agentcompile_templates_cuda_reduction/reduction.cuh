// What the kernels of the family share: the elements, the state of the plan's operation, the result that is written.
//
// An element is the expression of the plan over up to three inputs (the one input itself, a square of a difference, ...).
// Results are laid out [outer, inner]; `scale` is 1, or 1 / count of a mean; a variance is divided by `scale` as a count.
#pragma once
#include <agentcompile/dtype.cuh>
#include <agentcompile/inputs.cuh>
#include <agentcompile/ptx.cuh>
#include "states.cuh"

namespace {

using Elements = ac::Inputs<Epilogue, ac::Input<Plan::kind_0, Plan::A0>, ac::Input<Plan::kind_1, Plan::A1>, ac::Input<Plan::kind_2, Plan::A2>>;
using State = reduction::StateOf<Plan::operation>::type;
constexpr int step = Plan::step;

__device__ __forceinline__ Elements elements_of(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, long long period0,
                                                long long period1, long long period2) {
  return Elements{{in0, period0}, {in1, period1}, {in2, period2}};
}

template <int Op> __device__ __forceinline__ float value_of(const reduction::Single<Op>& state, float scale) { return state.value * scale; }
__device__ __forceinline__ float value_of(const reduction::Moments& state, float scale) { return state.squares / scale; }
template <bool Smallest> __device__ __forceinline__ float value_of(const reduction::Place<Smallest>& state, float) { return state.value(); }
__device__ __forceinline__ float value_of(const reduction::Exponentials& state, float) { return state.largest + logf(state.sum); }

template <class Other> __device__ __forceinline__ long long index_of(const Other&) { return 0; }
template <bool Smallest> __device__ __forceinline__ long long index_of(const reduction::Place<Smallest>& state) { return state.best.index; }

// Either of `out` and `indices` may be null.
__device__ __forceinline__ void write(const State& state, float scale, Plan::T* out, long long* indices, long long place) {
  const float value = value_of(state, scale);
  if constexpr (Plan::has_out) out[place] = ac::from_float<Plan::T>(Plan::root ? sqrtf(value) : value);
  if constexpr (Plan::has_indices) indices[place] = index_of(state);
}

// A part's state to and from a workspace [parts, results, words].
__device__ __forceinline__ void keep(const State& state, float* ws_states, long long place) {
#pragma unroll
  for (int i = 0; i < State::words; ++i) ws_states[place * State::words + i] = state.word(i);
}

}  // namespace
