// What scan_chunks.cu makes of keys, queries and decays before it goes over a prompt: for all heads of a group, and for all rows of a head.
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

// Of a warp, by the bits of its second pieces and of its third ones.
__device__ __forceinline__ int count_pieces(const unsigned (&rest)[2]) {
  const int has_second = __any_sync(ac::full_warp, rest[0] != 0);
  const int has_third = __any_sync(ac::full_warp, rest[1] != 0);
  return has_third ? 3 : has_second ? 2 : 1;
}

// Of those that the threads of a block have found.
__device__ __forceinline__ int most_of_block(int pieces) {
  const int has_second = __syncthreads_or(pieces > 1);
  const int has_third = __syncthreads_or(pieces > 2);
  return has_third ? 3 : has_second ? 2 : 1;
}

// Pieces of keys and queries, queries[i] keys[j]^T and for delta rules keys[i] keys[j]^T of 16 tokens by those of their chunk up to them.
__device__ __forceinline__ void make_products(const float* keys, const float* queries, const Plan::X* x, const long long* valid,
                                              Piece* key_pieces, Piece* query_pieces,
                                              Piece* own_pieces, float4* of_keys, float4* of_pairs, int2* counts,
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
  float sums[2][2][4] = {}, pairs[2][2][4] = {};
  unsigned of_queries[2] = {}, of_those[2] = {};  // whether queries, and keys, have second and third pieces
#pragma unroll 4
  for (int term = 0; term < terms; term += step) {
    unsigned query[most_pieces][4], key[most_pieces][4], later[most_pieces][4];
    load_split(queries, query_token, first, live, term, query);
    load_split(keys, key_token, first + (warp - own) * step, live, term, key);
    if constexpr (is_delta) load_split(keys, key_token, first, live, term, later);
#pragma unroll
    for (int p = 0; p < most_pieces; ++p) {
#pragma unroll
      for (int q = 0; p + q < most_pieces; ++q) {
        const unsigned right[4] = {key[q][0], key[q][2], key[q][1], key[q][3]};
        multiply_pair(sums[p + q > 0][0], sums[p + q > 0][1], query[p], right);
        if constexpr (is_delta) multiply_pair(pairs[p + q > 0][0], pairs[p + q > 0][1], later[p], right);
      }
    }
    if (warp == own) {
      store_split(query_pieces, apart, first, live, term, query);
      store_split(key_pieces, apart, first, live, term, key);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of_queries[0] |= query[1][i], of_queries[1] |= query[2][i];
        of_those[0] |= key[1][i], of_those[1] |= key[2][i];
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = (blockIdx.x * token_tiles + warp) * 64 + half * 32 + lane;
    of_keys[at] = whole(sums[0][half], sums[1][half]);
    if constexpr (is_delta) of_pairs[at] = whole(pairs[0][half], pairs[1][half]);
  }
  if (warp == own) {
    const int2 found = make_int2(count_pieces(of_queries), count_pieces(of_those));
    if (lane == 0) counts[blockIdx.x] = found;
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

struct Inverse {
  float lines[chunk][chunk + 4];
  float4 weights[chunk];
  float kept, unused[3];
};
constexpr int inverse_threads = chunk < 32 ? 32 : chunk;

// (1 + A)^-1 strength, A[i, j] = strength[i] exp(a[i] - a[j]) keys[i] keys[j]^T for j < i, of one head and chunk: a thread has a column.
// Written as a left side of 16 by 16, piece by piece, as a warp holds it.
__device__ __forceinline__ void make_inverse(Inverse& own, const float* decay, const float* rates, const float* strength,
                                             const long long* valid, const float4* of_pairs, uint4* inverses, int tokens, int groups,
                                             int heads, int decay_token, int decay_head, int strength_token, int strength_head) {
  const int head = blockIdx.x % heads, first = blockIdx.x / heads * chunk, group = head / (heads / groups);
  const int live = live_tokens(valid, tokens);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
  if (first >= live) return;
  if (warp == 0) {
    float steps[each], sizes[each];
    fetch_values(steps, decay + head * decay_head, decay_token, first, live);
    fetch_values(sizes, strength + head * strength_head, strength_token, first, live);
    weigh(steps, sizes, rate_of(rates, head), own.weights, &own.kept);
  }
  __syncthreads();
  for (int to = 0; to < token_tiles; ++to) {
    for (int i = warp; i < 2 * to + 2; i += inverse_threads / 32) {  // eight keys
      const bool here = first + to * step < live;
      float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (here) sums = of_pairs[static_cast<long long>((first / step + to) * groups + group) * token_tiles * 64 + i * 32 + lane];
      const float values[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int line = to * step + row + e / 2 * 8, key = i * 8 + 2 * column + e % 2;
        const float4 end = own.weights[line], begin = own.weights[key];
        own.lines[line][key] = key < line ? values[e] * decay_between(begin, end) * end.z : 0.0f;
      }
    }
  }
  __syncthreads();
  const int own_column = threadIdx.x;
  float found[chunk];
#pragma unroll
  for (int i = 0; i < chunk; ++i) {
    float sums[4] = {i == own_column ? -1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 line = *reinterpret_cast<const float4*>(&own.lines[i][j]);
      const float values[4] = {line.x, line.y, line.z, line.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (j + e < i) sums[e] = fmaf(values[e], found[j + e], sums[e]);
      }
    }
    found[i] = -((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
  __syncthreads();
  if (own_column < chunk) {
    const float size = own.weights[own_column].z;
#pragma unroll
    for (int i = 0; i < chunk; ++i) own.lines[i][own_column] = found[i] * size;
  }
  __syncthreads();
  for (int to = 0; to < token_tiles; ++to) {
    for (int from = warp; from <= to; from += inverse_threads / 32) {
      unsigned parts[most_pieces][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = *reinterpret_cast<const float2*>(&own.lines[to * step + row + i % 2 * 8][from * step + 2 * column + i / 2 * 8]);
        unsigned split[most_pieces];
        split_up(pair.x, pair.y, split);
#pragma unroll
        for (int p = 0; p < most_pieces; ++p) parts[p][i] = split[p];
      }
      uint4* target = inverses + ((static_cast<long long>(blockIdx.x) * token_tiles + to) * token_tiles + from) * most_pieces * 32 + lane;
#pragma unroll
      for (int p = 0; p < most_pieces; ++p) target[p * 32] = make_uint4(parts[p][0], parts[p][1], parts[p][2], parts[p][3]);
    }
  }
}

}  // namespace
