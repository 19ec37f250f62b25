// The second launch of a reduction in parts: a warp per result merges ws_states [splits, results, words] in a fixed order.
#pragma once
#include "reduction.cuh"

namespace {

__device__ __forceinline__ void finish(const float* ws_states, Plan::T* out, long long* indices, long long results, int splits, float scale) {
  const long long place = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / ac::warp_size;
  if (place >= results) return;
  State state = State::nothing();
  for (int split = threadIdx.x % ac::warp_size; split < splits; split += ac::warp_size) {
    State other;
#pragma unroll
    for (int i = 0; i < State::words; ++i) other.set_word(i, ac::load_relaxed(&ws_states[(split * results + place) * State::words + i]));
    state.merge(other);
  }
  state = reduction::merge_warp(state);
  if (threadIdx.x % ac::warp_size == 0) write(state, scale, out, indices, place);
}

}  // namespace
