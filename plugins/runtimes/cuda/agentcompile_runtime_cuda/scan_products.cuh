// How scan_chunks.cu takes keys and queries apart before it goes over a prompt, and what it makes of a chunk's decays.
#pragma once
#include <agentcompile/dtype.cuh>
#include <agentcompile/reduce.cuh>

#include "scan_steps.cuh"

namespace {

__device__ __forceinline__ int live_tokens(const long long* valid, int tokens) {
  return valid == nullptr ? tokens : static_cast<int>(max(0ll, min(static_cast<long long>(tokens), valid[0])));
}

// Neighbours 2 column and 2 column + 8 of lines `row` and `row` + 8 from `first` on, as a left side has them; zeros behind the last token.
__device__ __forceinline__ void load_split(const float* lines, int line_step, int first, int live, int term,
                                           unsigned (&pieces)[most_pieces][4]) {
  const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = first + row + i % 2 * 8;
    float2 pair = make_float2(0.0f, 0.0f);
    if (token < live) pair = *reinterpret_cast<const float2*>(lines + token * line_step + term + 2 * column + i / 2 * 8);
    unsigned split[most_pieces];
    split_up(pair.x, pair.y, split);
#pragma unroll
    for (int p = 0; p < most_pieces; ++p) pieces[p][i] = split[p];
  }
}

__device__ __forceinline__ void store_split(Piece* lines, int apart, int first, int live, int term,
                                            const unsigned (&pieces)[most_pieces][4]) {
  const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = first + row + i % 2 * 8;
    if (token >= live) continue;
    Piece* const to = lines + token * terms + term + 2 * column + i / 2 * 8;
#pragma unroll
    for (int p = 0; p < most_pieces; ++p) {
      *reinterpret_cast<unsigned*>(to + static_cast<long long>(p) * apart) = pieces[p][i];
    }
  }
}

__device__ __forceinline__ float4 whole(const float (&first)[4], const float (&others)[4]) {
  return make_float4(first[0] + others[0], first[1] + others[1], first[2] + others[2], first[3] + others[3]);
}

// The log decays of a warp's tokens, of which each lane has `each` neighbours, and their sums.
constexpr int each = (chunk + 31) / 32;

__device__ __forceinline__ void fetch_values(float (&values)[each], const float* from, int apart, int first, int live) {
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int token = threadIdx.x % 32 * each + i;
    values[i] = token < chunk && first + token < live ? from[(first + token) * apart] : 0.0f;
  }
}

// By one warp: weights of a chunk's tokens and the factor of S from log decays, which are `steps` by `rate`.
__device__ __forceinline__ void weigh(const float (&steps)[each], double rate, Tokens& own) {
  const int lane = threadIdx.x % 32;
  double sums[each], all = 0.0;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const double log_decay = steps[i] * rate;
    all += log_decay < -1000.0 ? -1000.0 : log_decay;  // 2^-1000 is 0; an infinity would leave no difference
    sums[i] = all;
  }
  double before = all;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const double other = __shfl_up_sync(ac::full_warp, before, offset);
    if (lane >= offset) before += other;
  }
  const double end = __shfl_sync(ac::full_warp, before, 31);
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int token = lane * each + i;
    const double sum = before - all + sums[i];
    const float main = static_cast<float>(sum), size = Plan::is_scaled ? steps[i] : 1.0f;
    const float counted = exp2f(static_cast<float>(end - sum)) * size;
    if (token < chunk) own.weights[token] = make_float4(main, static_cast<float>(sum - main), size, counted);
  }
  if (lane == 0) own.kept = exp2f(static_cast<float>(end));
}

__device__ __forceinline__ double rate_of(const float* rates, int head) {
  return (Plan::rates_each == 1 ? static_cast<double>(rates[head]) : 1.0) * 1.4426950408889634;
}

}  // namespace
