// Linear recurrences over the tokens of a chunk, selective scans and gated delta rules, in fp32, the state in registers:
//
//   S = f S;  S += w keys[t]^T;  y[t] = S queries[t] + skip x[t]    with w = x[t], or strength[t] (x[t] - S keys[t]) for delta rules
//
// S [H, P, terms] in `state` (null: zeros) and behind the last token in `last`, rows and terms of both by the same strides; x [T, H P] by
// strides of tokens and rows of S, of any type; keys and queries [T, G, terms], by strides of tokens and groups, terms side by side;
// strength [T, H] and decay [T, H] by strides; skip [H] or null; y [T, H P], dense. Where it is scaled, x times the decay stands for x in w.
// f is exp(decay rate): Plan::rates_each says what `rates` holds, 0: none (1), 1: [H], terms: [H, terms]; or, Plan::decay_of_terms,
// exp(decay) with a decay [T, H, terms]. `valid`: i64 [1], how many of the tokens count (null: all); y of the others is zero.
//
// A block has Plan::rows rows of S, all of one group, and stays with them for all tokens. `lanes` threads share a row, each holds `each` of
// its terms, in quads that lie `lanes` quads apart, of Plan::held rows that read the same keys and queries. Those of a tile of tokens come by
// cp.async into one of two stages while the tile before is computed, what a row has of its own through registers, factors made on the way.
// Sums of y over the lanes are made for a batch of tokens together: each lane ends with those of one token, 7 shuffles for 8 tokens.
// Wins over scans in chunks by products of the framework by the size of what those write between their launches (docs/performance.md).
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>

#include "plan.cuh"

namespace {

constexpr int terms = Plan::terms, lanes = Plan::lanes, rows = Plan::rows, held = Plan::held, tile = Plan::tile;
constexpr int each = terms / lanes, quads = each / 4;
constexpr int apart = rows / held;  // rows between those of a thread
constexpr int threads = apart * lanes;
constexpr int quads_of_line = terms / 4;
constexpr bool has_terms = Plan::rates_each == terms || Plan::decay_of_terms;  // factors differ from term to term
static_assert(terms % (4 * lanes) == 0 && rows % held == 0 && threads == Plan::threads && threads % ac::warp_size == 0, "whole warps");
constexpr int batch = lanes < 8 ? lanes : 8;  // tokens whose sums are made together
constexpr int sharing = lanes / batch;        // lanes that end with the same token's
static_assert(tile % batch == 0, "whole batches");

struct Stage {
  float4 keys[tile][quads_of_line];
  float4 queries[tile][quads_of_line];
  float4 decays[Plan::decay_of_terms ? tile : 1][quads_of_line];
  float2 pairs[tile][rows];  // x, scaled where it is; and the factor, or the decay itself where each term has its own rate
  float skipped[tile][rows];
  float strengths[Plan::is_delta ? tile : 1][rows];
};

constexpr int values = (tile * rows + threads - 1) / threads;           // of each kind that a thread brings of a tile
constexpr int fetches = (tile * quads_of_line + threads - 1) / threads;  // quads that it brings of keys and of queries

// One value of every tile that a thread brings for a row, and what it is multiplied by. Where it lies is counted from the tile's first token.
struct Value {
  int token, row, x, decay, strength;
  float rate, skip;
  Plan::X of_x;
  float of_decay, of_strength;
};

// One quad of keys, queries and decays of every tile.
struct Quad {
  int token, quad, key, query, decay;
};

// Reads nothing behind the last token, where zeros change nothing.
__device__ __forceinline__ void fetch(float4 (*to)[quads_of_line], const float* from, const Quad& quad, int offset, bool here) {
  ac::cp_async16_zero_fill(&to[quad.token][quad.quad], from + (here ? offset : 0), here);
}

__device__ __forceinline__ void unpack(float* to, float4 from) {
  to[0] = from.x, to[1] = from.y, to[2] = from.z, to[3] = from.w;
}

// Sums that do not wait for each other.
constexpr int chains = each < 16 ? 2 : 4;
__device__ __forceinline__ float sum_of(const float (&parts)[chains]) {
  float sum = parts[0] + parts[1];
  if constexpr (chains > 2) sum += parts[2] + parts[3];
  return sum;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads, 1)
recurrence(const float* state, const float* decay, const Plan::X* x, const float* keys, const float* queries, const float* rates,
           const float* strength, const long long* valid, const float* skip, float* y, float* last, int tokens, int all_rows,
           int state_row, int state_term, int x_token, int x_row, int decay_token, int decay_head, int strength_token, int strength_head,
           int key_token, int key_group, int query_token, int query_group) {
  ac::launch_dependents();
  ac::grid_dependency_wait();
  AC_DYNAMIC_SHARED(Stage, stages);
  constexpr int rows_of_head = Plan::rows_of_head;
  const int lane = threadIdx.x % lanes, first_row = blockIdx.x * rows;
  const int row_of_block = threadIdx.x / lanes;  // the first of the thread's
  const int group = first_row / Plan::rows_of_group;
  const int live = valid == nullptr ? tokens : static_cast<int>(max(0ll, min(static_cast<long long>(tokens), valid[0])));
  keys += group * key_group;
  queries += group * query_group;
  decay += Plan::decay_of_terms ? first_row / rows_of_head * decay_head : 0;

  float s[held][each], rate[Plan::rates_each == terms ? held : 1][each];
#pragma unroll
  for (int r = 0; r < held; ++r) {
    const int row = first_row + row_of_block + r * apart, head = row / rows_of_head;
    const long long begin = static_cast<long long>(head) * rows_of_head * terms + row % rows_of_head * state_row;
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const int term = (j / 4 * lanes + lane) * 4 + j % 4;
      s[r][j] = state == nullptr ? 0.0f : state[begin + term * state_term];
      if constexpr (Plan::rates_each == terms) rate[r][j] = rates[head * terms + term];
    }
  }

  Value brought[values];
  const bool by_token = x_token == 1;  // neighbours in memory are those of neighbouring threads
#pragma unroll
  for (int i = 0; i < values; ++i) {
    Value& value = brought[i];
    const int at = i * threads + static_cast<int>(threadIdx.x);
    value.token = by_token ? at % tile : at / rows;
    value.row = by_token ? at / tile : at % rows;
    const bool is_one = value.token < tile && value.row < rows;
    if (!is_one) value.token = max(tokens, tile);  // of no tile
    const int row = is_one ? first_row + value.row : first_row, head = row / rows_of_head;
    value.x = value.token * x_token + row * x_row;
    value.decay = value.token * decay_token + head * decay_head;
    value.strength = value.token * strength_token + head * strength_head;
    value.rate = Plan::rates_each == 1 ? rates[head] : 1.0f;
    value.skip = skip != nullptr ? skip[head] : 0.0f;
  }
  Quad quads_brought[fetches];
#pragma unroll
  for (int i = 0; i < fetches; ++i) {
    const int at = i * threads + static_cast<int>(threadIdx.x);
    Quad& quad = quads_brought[i];
    quad.token = at / quads_of_line, quad.quad = at % quads_of_line;
    quad.key = quad.token * key_token + quad.quad * 4;
    quad.query = quad.token * query_token + quad.quad * 4;
    quad.decay = quad.token * decay_token + quad.quad * 4;
  }
  auto bring = [&](int first) {
    Stage& stage = stages[first / tile % 2];
#pragma unroll
    for (int i = 0; i < fetches; ++i) {
      const Quad& quad = quads_brought[i];
      if (quad.token >= tile) continue;
      const bool here = first + quad.token < live;
      fetch(stage.keys, keys, quad, quad.key, here);
      fetch(stage.queries, queries, quad, quad.query, here);
      if constexpr (Plan::decay_of_terms) fetch(stage.decays, decay, quad, quad.decay, here);
    }
    ac::cp_async_commit();
    keys += tile * key_token;
    queries += tile * query_token;
#pragma unroll
    for (int i = 0; i < values; ++i) {
      Value& value = brought[i];
      const bool here = first + value.token < live;
      value.of_x = here ? x[value.x] : ac::from_float<Plan::X>(0.0f);
      if constexpr (!Plan::decay_of_terms) value.of_decay = here ? decay[value.decay] : 0.0f;
      if constexpr (Plan::is_delta) value.of_strength = here ? strength[value.strength] : 0.0f;
    }
    x += tile * x_token;
    decay += tile * decay_token;
    if constexpr (Plan::is_delta) strength += tile * strength_token;
  };
  auto settle = [&](Stage& stage) {
#pragma unroll
    for (int i = 0; i < values; ++i) {
      const Value& value = brought[i];
      if (value.token >= tile) continue;
      const float of_row = ac::to_float(value.of_x), step = Plan::decay_of_terms ? 0.0f : value.of_decay;
      const float factor = has_terms ? step : expf(step * value.rate);
      stage.pairs[value.token][value.row] = make_float2(Plan::is_scaled ? of_row * step : of_row, factor);
      if (skip != nullptr) stage.skipped[value.token][value.row] = of_row * value.skip;
      if constexpr (Plan::is_delta) stage.strengths[value.token][value.row] = value.of_strength;
    }
    ac::cp_async_wait<0>();
  };

  bring(0);
  for (int first = 0; first < live; first += tile) {
    const Stage& stage = stages[first / tile % 2];
    settle(stages[first / tile % 2]);
    __syncthreads();  // the tile is there, and nobody reads the one before any more
    if (first + tile < live) bring(first + tile);

    for (int begin = 0; begin < tile && first + begin < live; begin += batch) {
      float sums[held][batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        const int token = begin + i;
        float key[each], query[each], factor[has_terms ? each : 1];
#pragma unroll
        for (int q = 0; q < quads; ++q) {
          unpack(key + 4 * q, stage.keys[token][q * lanes + lane]);
          unpack(query + 4 * q, stage.queries[token][q * lanes + lane]);
          if constexpr (Plan::decay_of_terms) {
            unpack(factor + 4 * q, stage.decays[token][q * lanes + lane]);
#pragma unroll
            for (int j = 4 * q; j < 4 * q + 4; ++j) factor[j] = expf(factor[j]);
          }
        }
#pragma unroll
        for (int r = 0; r < held; ++r) {
          const int row = row_of_block + r * apart;
          const float2 pair = stage.pairs[token][row];
          float added = pair.x;
          if constexpr (!Plan::decay_of_terms) factor[0] = pair.y;
          if constexpr (Plan::rates_each == terms) {
            const float step = factor[0];
#pragma unroll
            for (int j = 0; j < each; ++j) factor[j] = expf(step * rate[r][j]);
          }
          float known[chains] = {}, sum[chains] = {};
          if constexpr (Plan::is_delta) {
#pragma unroll
            for (int j = 0; j < each; ++j) {
              known[j % chains] = fmaf(has_terms ? s[r][j] * factor[j] : s[r][j], key[j], known[j % chains]);
            }
            const float all = ac::warp_sum<lanes>(sum_of(known));
            added = stage.strengths[token][row] * (added - (has_terms ? all : factor[0] * all));
          }
#pragma unroll
          for (int j = 0; j < each; ++j) {
            s[r][j] = fmaf(factor[has_terms ? j : 0], s[r][j], added * key[j]);
            sum[j % chains] = fmaf(s[r][j], query[j], sum[j % chains]);
          }
          sums[r][i] = sum_of(sum);
        }
      }
#pragma unroll
      for (int r = 0; r < held; ++r) {
#pragma unroll
        for (int count = batch / 2; count > 0; count /= 2) {
          const int offset = count * sharing;
          const bool upper = (lane & offset) != 0;
#pragma unroll
          for (int i = 0; i < count; ++i) {
            const float kept = upper ? sums[r][i + count] : sums[r][i], given = upper ? sums[r][i] : sums[r][i + count];
            sums[r][i] = kept + __shfl_xor_sync(ac::full_warp, given, offset);
          }
        }
        const float sum = ac::warp_sum<sharing>(sums[r][0]);
        const int token = begin + lane / sharing, row = row_of_block + r * apart;
        if (first + token < live && lane % sharing == 0) {
          const float skipped = skip != nullptr ? stage.skipped[token][row] : 0.0f;
          y[static_cast<long long>(first + token) * all_rows + first_row + row] = sum + skipped;
        }
      }
    }
  }

  for (int i = threadIdx.x; i < (tokens - live) * rows; i += threads) {
    y[static_cast<long long>(live + i / rows) * all_rows + first_row + i % rows] = 0.0f;
  }
#pragma unroll
  for (int r = 0; r < held; ++r) {
    const int row = first_row + row_of_block + r * apart;
    const long long begin = static_cast<long long>(row / rows_of_head) * rows_of_head * terms + row % rows_of_head * state_row;
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      const int term = (q * lanes + lane) * 4;
      if (state_term == 1) {
        *reinterpret_cast<float4*>(last + begin + term) = make_float4(s[r][4 * q], s[r][4 * q + 1], s[r][4 * q + 2], s[r][4 * q + 3]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) last[begin + (term + j) * state_term] = s[r][4 * q + j];
      }
    }
  }
}
