// What scan_chunks.cu makes of keys and queries before it goes over a prompt, for all heads of a group; and of a chunk's decays.
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

// Pieces of keys and queries, queries[i] keys[j]^T of 16 tokens by those of their chunk up to them.
__device__ __forceinline__ void make_products(const float* keys, const float* queries, const Plan::X* x, const long long* valid,
                                              Piece* key_pieces, Piece* query_pieces,
                                              Piece* own_pieces, float4* of_keys, int* counts,
                                              int tokens, int groups, int all_rows, int x_token, int x_row,
                                              int key_token, int key_group, int query_token, int query_group) {
  const int tile = blockIdx.x / groups, group = blockIdx.x % groups, live = live_tokens(valid, tokens);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = tile * step, own = tile % token_tiles;
  if (first >= live) return;
  if constexpr (x_pieces > 1) {
    for (int i = threadIdx.x; i < step * Plan::rows_of_group; i += token_tiles * 32) {
      const int token = first + i / Plan::rows_of_group, row = group * Plan::rows_of_group + i % Plan::rows_of_group;
      if (token >= live) break;
      unsigned split[most_pieces];
      split_up(ac::to_float(x[static_cast<long long>(token) * x_token + static_cast<long long>(row) * x_row]), 0.0f, split);
      for (int p = 0; p < x_pieces; ++p) {
        own_pieces[(static_cast<long long>(p) * tokens + token) * all_rows + row] = static_cast<Piece>(split[p]);
      }
    }
  }
  if (warp > own) return;
  keys += group * key_group;
  queries += group * query_group;
  const int apart = groups * tokens * terms;  // pieces from each other
  key_pieces += group * tokens * terms;
  query_pieces += group * tokens * terms;
  float sums[2][2][4] = {};
  unsigned second = 0, third = 0;  // whether there are such pieces
#pragma unroll 4
  for (int term = 0; term < terms; term += step) {
    unsigned query[most_pieces][4], key[most_pieces][4];
    load_split(queries, query_token, first, live, term, query);
    load_split(keys, key_token, first + (warp - own) * step, live, term, key);
#pragma unroll
    for (int p = 0; p < most_pieces; ++p) {
#pragma unroll
      for (int q = 0; p + q < most_pieces; ++q) {
        const unsigned right[4] = {key[q][0], key[q][2], key[q][1], key[q][3]};
        multiply_pair(sums[p + q > 0][0], sums[p + q > 0][1], query[p], right);
      }
    }
    if (warp == own) {
      store_split(query_pieces, apart, first, live, term, query);
      store_split(key_pieces, apart, first, live, term, key);
#pragma unroll
      for (int i = 0; i < 4; ++i) second |= query[1][i] | key[1][i], third |= query[2][i] | key[2][i];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = (blockIdx.x * token_tiles + warp) * 64 + half * 32 + lane;
    of_keys[at] = whole(sums[0][half], sums[1][half]);
  }
  if (warp == own) {
    const int has_second = __any_sync(ac::full_warp, second != 0);
    const int has_third = __any_sync(ac::full_warp, third != 0);
    if (lane == 0) counts[blockIdx.x] = has_third ? 3 : has_second ? 2 : 1;
  }
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

// By one warp: weights of a chunk's tokens and the factor of S from log decays, which are `steps` by `rate`, and what each x counts.
__device__ __forceinline__ void weigh(const float (&steps)[each], const float (&sizes)[each], double rate, float4* weights, float* kept) {
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
    const float main = static_cast<float>(sum), counted = exp2f(static_cast<float>(end - sum)) * sizes[i];
    if (token < chunk) weights[token] = make_float4(main, static_cast<float>(sum - main), sizes[i], counted);
  }
  if (lane == 0) *kept = exp2f(static_cast<float>(end));
}

__device__ __forceinline__ double rate_of(const float* rates, int head) {
  return (Plan::rates_each == 1 ? static_cast<double>(rates[head]) : 1.0) * 1.4426950408889634;
}

}  // namespace
