// What warps of scan_chunks.cu make of one step: y of 16 tokens and S of 16 rows, from what lies in shared memory; and how it lies there.
#pragma once
#include <agentcompile/ptx.cuh>

#include "pieces.cuh"
#include "plan.cuh"

namespace {

constexpr int terms = Plan::terms, rows = Plan::rows, chunk = Plan::chunk, warps = Plan::warps, x_pieces = Plan::x_pieces;
constexpr int threads = warps * 32, token_tiles = chunk / step, row_tiles = rows / step;
constexpr int y_rows = rows / (warps / token_tiles), y_tiles = y_rows / 8;   // of a warp, and eight by eight
constexpr int s_terms = terms / (warps / row_tiles), s_tiles = s_terms / 8;  // likewise
static_assert(warps % token_tiles == 0 && warps % row_tiles == 0 && y_rows % step == 0 && s_terms % step == 0, "pairs of tiles");

// Of a piece of queries and of keys.
constexpr int slot_pieces = 2 * chunk * terms, keys_of_slot = chunk * terms;

// What a chunk's tokens have of their own: x; {a, what a float leaves of it, w, what the token counts in the next state}, in units of log2.
struct Tokens {
  Piece x[x_pieces][chunk * rows];
  float4 weights[chunk];
  float kept, unused[3];  // the factor of S
};

struct Shared {
  Piece slots[2 * slot_pieces];
  Tokens tokens[2];
  Piece state[most_pieces * rows * terms];
};

// By the weights of two tokens.
__device__ __forceinline__ float decay_between(float4 begin, float4 end) { return ac::quick_exp2((end.x - begin.x) + (end.y - begin.y)); }

// Enqueues the copies of `chunk` lines of Width numbers, `apart` from each other; those behind the first `left` become zeros.
template <int Width> __device__ __forceinline__ void bring_lines(Piece* to, const Piece* from, int apart, int left) {
  constexpr int units = Width / 8, lines = threads / units;  // that all threads bring at a time
  if constexpr (threads % units == 0 && lines % 8 == 0 && chunk % lines == 0) {
    const int line = threadIdx.x / units, unit = threadIdx.x % units;
    to += place<Width>(line, unit);
    from += static_cast<long long>(line) * apart + unit * 8;
    if (left >= chunk) {
#pragma unroll
      for (int i = 0; i < chunk / lines; ++i) ac::cp_async16(to + i * lines * Width, from + static_cast<long long>(i * lines) * apart);
      return;
    }
#pragma unroll
    for (int i = 0; i < chunk / lines; ++i) {
      const bool here = line + i * lines < left;
      ac::cp_async16_zero_fill(to + i * lines * Width, from + (here ? static_cast<long long>(i * lines) * apart : 0), here);
    }
  } else {
#pragma unroll 4
    for (int i = threadIdx.x; i < chunk * units; i += threads) {
      const int line = i / units, unit = i % units;
      const bool here = line < left;
      ac::cp_async16_zero_fill(to + place<Width>(line, unit), from + (here ? static_cast<long long>(line) * apart + unit * 8 : 0), here);
    }
  }
}

// Two neighbours, piece by piece, Apart from each other.
template <int Apart> __device__ __forceinline__ void store_split_pair(Piece* to, float a, float b) {
  unsigned split[most_pieces];
  split_up(a, b, split);
#pragma unroll
  for (int p = 0; p < most_pieces; ++p) *reinterpret_cast<unsigned*>(to + p * Apart) = split[p];
}

// Two neighbours of x.
__device__ __forceinline__ float2 x_pair(const Tokens& tokens, int at) {
  float2 pair = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int p = x_pieces - 1; p >= 0; --p) {
    const float2 of_piece = unpacked(*reinterpret_cast<const unsigned*>(tokens.x[p] + at));
    pair.x += of_piece.x, pair.y += of_piece.y;
  }
  return pair;
}

__device__ __forceinline__ void clear(float (&y)[2][y_tiles][4]) {
#pragma unroll
  for (int n = 0; n < y_tiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) y[0][n][e] = y[1][n][e] = 0.0f;
  }
}

// Adds S queries of 16 tokens to y, S by its first `Count` pieces.
template <int Count>
__device__ __forceinline__ void read_state(const Piece* slots, int query_at, const Piece* state, int state_at, float (&y)[2][y_tiles][4]) {
#pragma unroll
  for (int term = 0; term < terms; term += step) {
    unsigned query[4];
    ac::ldmatrix_x4(query, slots + (query_at ^ term));
#pragma unroll
    for (int p = 0; p < Count; ++p) {
#pragma unroll
      for (int n = 0; n < y_tiles; n += 2) {
        unsigned part[4];
        ac::ldmatrix_x4(part, state + (state_at ^ term) + (p * rows + n * 8) * terms);
        multiply_pair(y[p > 0][n], y[p > 0][n + 1], query, part);
      }
    }
  }
}

// The same for piece `piece` of queries.
__device__ __forceinline__ void read_pieces(int piece, const Piece* slots, int query_at, const Piece* state, int state_at,
                                            float (&y)[2][y_tiles][4]) {
  if (piece == 0) {
    read_state<3>(slots, query_at, state, state_at, y);
  } else if (piece == 1) {
    read_state<2>(slots, query_at, state, state_at, y);
  } else {
    read_state<1>(slots, query_at, state, state_at, y);
  }
}

// Adds x keys^T of all tokens, as they count in the next state, to 16 rows by s_terms terms: x by its first `Count` pieces.
template <int Count>
__device__ __forceinline__ void add_tokens(const Piece* slots, int key_at, const float4* token_weights, const Piece* x, int x_at,
                                           float (&added)[2][s_tiles][4]) {
  const int column = threadIdx.x % 4;
#pragma unroll
  for (int token = 0; token < chunk; token += step) {
    unsigned found[x_pieces][4], weighed[most_pieces][4];
#pragma unroll
    for (int p = 0; p < x_pieces; ++p) ac::ldmatrix_x4_transposed(found[p], x + x_at + (p * chunk + token) * rows);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 pair = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int p = x_pieces - 1; p >= 0; --p) {
        const float2 of_piece = unpacked(found[p][i]);
        pair.x += of_piece.x, pair.y += of_piece.y;
      }
      const float4* weights = token_weights + token + 2 * column + i / 2 * 8;
      unsigned split[most_pieces];
      split_up(pair.x * weights[0].w, pair.y * weights[1].w, split);
#pragma unroll
      for (int p = 0; p < Count; ++p) weighed[p][i] = split[p];
    }
#pragma unroll
    for (int n = 0; n < s_tiles; n += 2) {
      unsigned key[4];
      ac::ldmatrix_x4_transposed(key, slots + (key_at ^ n * 8) + token * terms);
#pragma unroll
      for (int p = 0; p < Count; ++p) multiply_pair(added[p > 0][n], added[p > 0][n + 1], weighed[p], key);
    }
  }
}

// Adds `left` [16, 16 tokens] by rows of x of those tokens.
__device__ __forceinline__ void multiply_rows(const unsigned (&left)[most_pieces][4], const Piece* x, int x_at, float (&y)[2][y_tiles][4]) {
#pragma unroll
  for (int q = 0; q < x_pieces; ++q) {
#pragma unroll
    for (int n = 0; n < y_tiles; n += 2) {
      unsigned right[4];
      ac::ldmatrix_x4_transposed(right, x + (x_at ^ n * 8) + q * chunk * rows);
#pragma unroll
      for (int p = 0; p + q < most_pieces; ++p) multiply_pair(y[p + q > 0][n], y[p + q > 0][n + 1], left[p], right);
    }
  }
}

// Adds what the tokens of step `from` give to y of the 16 tokens of step `to`, of which the lane has those of `ends` and eight further.
__device__ __forceinline__ void add_products(const float4* weights, const Piece* x, const float4 (&of_step)[2], const float4 (&ends)[2],
                                             int from, int to, int x_at, float (&y)[2][y_tiles][4]) {
  const int first = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
  unsigned weighed[most_pieces][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sums[4] = {of_step[half].x, of_step[half].y, of_step[half].z, of_step[half].w};
    const int key = 2 * column + half * 8;  // in its step
    float values[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float4 end = ends[e / 2], begin = weights[from * step + key + e % 2];
      const float weight = decay_between(begin, end) * begin.z;
      values[e] = from < to || key + e % 2 <= first + e / 2 * 8 ? sums[e] * weight : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned split[most_pieces];
      split_up(values[2 * i], values[2 * i + 1], split);
#pragma unroll
      for (int p = 0; p < most_pieces; ++p) weighed[p][2 * half + i] = split[p];
    }
  }
  multiply_rows(weighed, x + from * step * rows, x_at, y);
}

}  // namespace
