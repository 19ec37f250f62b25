// Scans whose heads decay as one (Mamba-2), over the tokens of a chunk of a prompt by tensor cores, in fp32:
//
//   S = f S + w x[t] keys[t]^T;  y[t] = S queries[t] + skip x[t]    with f = exp(decay[t] rate), w = decay[t] where it is scaled, or 1
//
// A block has `rows` rows of the state of one head, in registers, and goes over Plan::chunk tokens at a time. With a, the sums of log
// decays from a chunk's first token on,
//
//   y[i] = exp(a[i]) S queries[i] + sum over j <= i of exp(a[i] - a[j]) w[j] (queries[i] keys[j]) x[j]
//   S = exp(a[last]) S + sum over j of exp(a[last] - a[j]) w[j] x[j] keys[j]^T        (Dao and Gu 2024, arXiv 2405.21060)
//
// Nothing is ever exp(a[i]) / exp(a[j]). Sums a are made in fp64 and kept as two floats: behind a strong decay small ones would be lost.
// What is fp32 is multiplied as pieces of bf16 (pieces.cuh). `products` goes first, once for all heads of a group: the pieces of keys and
// queries, how many there are (one where they come from bf16 activations), products of queries and keys of every chunk, and pieces of x, if
// it is not bf16. Sums of first pieces and of the others are apart, since tensor cores truncate where they add; S is added to by FMA.
//
// In `scan_chunks` a warp makes y of 16 tokens by a part of the rows and S of 16 rows by a part of the terms. S comes to y through shared
// memory, in pieces; queries and keys, piece by piece, into two slots by cp.async, a step ahead, x and sums of decays with them. The weights
// of x never leave the registers of the products that they are made of. What is not finite reaches all tokens of its 16.
// Operands lie as those of recurrence.cu, x [T, H P] with rows side by side; key_pieces and query_pieces [3, G, T, terms], own_pieces
// [2 or 3, T, H P], products by tile of 16 tokens, group and eight keys as a warp holds them, counts [tiles, G].
// Wins over recurrence.cu from about a chunk of tokens on.
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>

#include "scan_products.cuh"

// Of keys by those of their chunk up to them, a block for 16 tokens of a group.
extern "C" __global__ void __launch_bounds__(token_tiles * 32)
products(const float* keys, const float* queries, const Plan::X* x, const long long* valid, Piece* key_pieces, Piece* query_pieces,
         Piece* own_pieces, float4* of_keys, int* counts, int tokens, int groups, int all_rows, int x_token, int x_row,
         int key_token, int key_group, int query_token, int query_group) {
  ac::launch_dependents();
  ac::grid_dependency_wait();
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

extern "C" __global__ void __launch_bounds__(Plan::warps * 32, Plan::blocks)
scan_chunks(const float* state, const float* decay, const Piece* x, const float* rates, const long long* valid, const float* skip,
            const Piece* key_pieces, const Piece* query_pieces, const float4* of_keys, const int* counts, float* y,
            float* last, int tokens, int groups, int all_rows, int state_row, int state_term, int x_token, int decay_token,
            int decay_head) {
  ac::launch_dependents();
  ac::grid_dependency_wait();
  AC_DYNAMIC_SHARED(Shared, shared);
  constexpr int rows_of_head = Plan::rows_of_head;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_of_lane = lane / 4, column = lane % 4;
  const int first_row = blockIdx.x * rows, head = first_row / rows_of_head, group = first_row / Plan::rows_of_group;
  const int live = live_tokens(valid, tokens);
  const int y_tile = warp % token_tiles, y_row = warp / token_tiles * y_rows;
  const int s_row = warp % row_tiles * step, s_term = warp / row_tiles * s_terms;

  int found = 1;
  for (int i = threadIdx.x; i * step < live; i += threads) found = max(found, counts[i * groups + group]);
  const int has_second = __syncthreads_or(found > 1);
  const int has_third = __syncthreads_or(found > 2);
  const int pieces = has_third ? 3 : has_second ? 2 : 1;

  const long long line = static_cast<long long>(group) * tokens;
  auto bring = [&](int first, int piece, int slot, Tokens& own) {
    const long long begin = (static_cast<long long>(piece) * groups * tokens + line + first) * terms;
    const int left = live - first;  // tokens
    bring_lines<terms>(shared->slots + slot * slot_pieces, query_pieces + begin, terms, left);
    bring_lines<terms>(shared->slots + slot * slot_pieces + keys_of_slot, key_pieces + begin, terms, left);
    if (piece == 0) {
#pragma unroll
      for (int p = 0; p < x_pieces; ++p) {
        bring_lines<rows>(own.x[p], x + (static_cast<long long>(p) * tokens + first) * x_token + first_row, x_token, left);
      }
    }
    ac::cp_async_commit();
  };

  const double rate = rate_of(rates, head);
  float steps[each];  // of the first warp, which has the fewest products
  auto fetch_steps = [&](int first) { fetch_values(steps, decay + head * decay_head, decay_token, first, live); };

  if (live > 0) {
    bring(0, 0, 0, shared->tokens[0]);
    if (warp == 0) {
      fetch_steps(0);
      weigh(steps, rate, shared->tokens[0]);
    }
  }
  float s[s_tiles][4];
  const long long state_begin =
      static_cast<long long>(head) * rows_of_head * terms + (first_row % rows_of_head + s_row + row_of_lane) * state_row;
#pragma unroll
  for (int n = 0; n < s_tiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[n][e] = state == nullptr ? 0.0f : state[state_begin + e / 2 * 8 * state_row + (s_term + n * 8 + 2 * column + e % 2) * state_term];
    }
  }
  auto store_state = [&] {
#pragma unroll
    for (int n = 0; n < s_tiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int to = place<terms>(s_row + row_of_lane + half * 8, s_term / 8 + n) + 2 * column;
        store_split_pair<rows * terms>(shared->state + to, s[n][2 * half], s[n][2 * half + 1]);
      }
    }
  };
  store_state();

  const int query_place = lines_first<terms>() + y_tile * step * terms, state_place = numbers_first<terms>() + y_row * terms;
  const int key_place = (lines_first<terms>() ^ s_term) + keys_of_slot;
  const int left_place = numbers_first<rows>() ^ s_row, right_place = lines_first<rows>() ^ y_row;
  float out[2][y_tiles][4];  // y of first pieces, and of the others
  for (int first = 0, piece = 0, slot = 0; first < live; slot = 1 - slot) {
    ac::cp_async_wait<0>();
    __syncthreads();  // what the step reads is there, and nobody reads the other slot any more
    const bool is_last = piece + 1 == pieces;
    const int next = is_last ? first + chunk : first, next_piece = is_last ? 0 : piece + 1;
    const int query_at = query_place + slot * slot_pieces, key_at = key_place + slot * slot_pieces;
    const Tokens& own = shared->tokens[first / chunk % 2];
    Tokens& others = shared->tokens[next / chunk % 2];
    if (next < live) {
      bring(next, next_piece, 1 - slot, others);
      if (is_last && warp == 0) fetch_steps(next);
    }

    const int token = first + y_tile * step;
    const bool is_live = token < live;
    float4 of_steps[2][2];  // of two steps of keys: the next one is on its way
    const float4* of_step = of_keys + static_cast<long long>(token / step * groups + group) * token_tiles * 64 + lane;
    auto fetch_products = [&](int from) { of_steps[from % 2][0] = of_step[from * 64], of_steps[from % 2][1] = of_step[from * 64 + 32]; };
    if (is_live) {
      if (is_last) fetch_products(0);
      if (is_last && y_tile > 0) fetch_products(1);
      if (piece == 0) clear(out);
      read_pieces(piece, shared->slots, query_at, shared->state, state_place, out);
    }
    const int line_of_lane = y_tile * step + row_of_lane;
    const float4 ends[2] = {own.weights[line_of_lane], own.weights[line_of_lane + 8]};
    const float decayed[2] = {exp2f(ends[0].x), exp2f(ends[1].x)};
    if (is_live && is_last) {
#pragma unroll
      for (int n = 0; n < y_tiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[0][n][e] = (out[0][n][e] + out[1][n][e]) * decayed[e / 2], out[1][n][e] = 0.0f;
      }
#pragma unroll
      for (int from = 0; from < token_tiles; ++from) {
        if (from > y_tile) continue;
        const float4 now[2] = {of_steps[from % 2][0], of_steps[from % 2][1]};
        if (from + 2 <= y_tile) fetch_products(from + 2);
        add_products(own.weights, own.x[0], now, ends, from, y_tile, right_place, out);
      }
      const float skipped = skip != nullptr ? skip[head] : 0.0f;
#pragma unroll
      for (int n = 0; n < y_tiles; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float2 pair = make_float2(out[0][n][2 * half] + out[1][n][2 * half], out[0][n][2 * half + 1] + out[1][n][2 * half + 1]);
          const float2 of_x = x_pair(own, place<rows>(line_of_lane + half * 8, y_row / 8 + n) + 2 * column);
          pair.x = skip != nullptr ? fmaf(skipped, of_x.x, pair.x) : pair.x;
          pair.y = skip != nullptr ? fmaf(skipped, of_x.y, pair.y) : pair.y;
          const int of_half = token + row_of_lane + half * 8;
          float2* to = reinterpret_cast<float2*>(y + static_cast<long long>(of_half) * all_rows + first_row + y_row + n * 8 + 2 * column);
          if (of_half < live) *to = pair;
        }
      }
    }

    float added[2][s_tiles][4] = {};
    if (piece == 0) {
      add_tokens<3>(shared->slots, key_at, own.weights, own.x[0], left_place, added);
    } else if (piece == 1) {
      add_tokens<2>(shared->slots, key_at, own.weights, own.x[0], left_place, added);
    } else {
      add_tokens<1>(shared->slots, key_at, own.weights, own.x[0], left_place, added);
    }
    const float kept = piece == 0 ? own.kept : 1.0f;
#pragma unroll
    for (int n = 0; n < s_tiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = fmaf(kept, s[n][e], added[0][n][e] + added[1][n][e]);
    }
    if (is_last && next < live) {
      if (warp == 0) weigh(steps, rate, others);
      __syncthreads();  // nobody reads the state before any more
      store_state();
    }
    first = next, piece = next_piece;
  }

  for (int i = threadIdx.x; i < (tokens - live) * rows; i += threads) {
    y[static_cast<long long>(live + i / rows) * all_rows + first_row + i % rows] = 0.0f;
  }
#pragma unroll
  for (int n = 0; n < s_tiles; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* to = last + state_begin + half * 8 * state_row + (s_term + n * 8 + 2 * column) * state_term;
      if (state_term == 1) {
        *reinterpret_cast<float2*>(to) = make_float2(s[n][2 * half], s[n][2 * half + 1]);
      } else {
        to[0] = s[n][2 * half], to[state_term] = s[n][2 * half + 1];
      }
    }
  }
}
