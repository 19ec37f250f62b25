// Passes of a block over neighbouring scores of one row: what the kernels share that read their scores twice.
#pragma once
#include "softmax.cuh"

namespace {

// Maximum and sum of the scores first .. end - 1, by a block of `Warps` warps; `first` is a multiple of Plan::step.
template <int Warps>
__device__ __forceinline__ Online scan(const Scores& scores, long long first, long long end, bool vectors, Online* states) {
  Online state = Online::nothing();
  for (long long i = first + static_cast<int>(threadIdx.x) * Plan::step; i < end; i += Warps * ac::warp_size * Plan::step) {
    float values[Plan::step];
    scores.load_below(i, end, minus_infinity(), vectors, values);
    state.add(values);
  }
  return merge_block<Warps>(state, states, threadIdx.x / ac::warp_size, threadIdx.x % ac::warp_size);
}

// The results of the scores first .. end - 1 of a row whose maximum and sum are `whole`.
__device__ __forceinline__ void write(const Scores& scores, const Online& whole, long long first, long long end, bool vectors, T* out) {
  const float factor = whole.factor();
  for (long long i = first + static_cast<int>(threadIdx.x) * Plan::step; i < end; i += Plan::threads * Plan::step) {
    float values[Plan::step];
    scores.load_below(i, end, minus_infinity(), vectors, values);
#pragma unroll
    for (int e = 0; e < Plan::step; ++e) values[e] = result(values[e], whole.maximum, factor);
    ac::store_below(values, out, i, end, vectors);
  }
}

}  // namespace
