// Attention of a prompt chunk over what is cached, by warpgroups (wgmma), fp16 and bf16, sm_90a:
//
//   out[t, h] = sum over i <= start + t of softmax(scale q[t, h] k[i, h / share]) v[i, h / share]
//
// q [count, heads, dim], k and v [start + count, heads / share, dim] in any steps, of which the launch has tensor maps; fp32 scores, sums
// and results, weights in T as the products take them. exp2 is the hardware's. Rows of v may have another width than those of q and k,
// and either fewer channels than Plan::dim and Plan::value_dim, which are whole spans: what is missing arrives as zeros, and of results
// only `channels` are written. Where the plan says so, a row sees the last `window` keys alone, scores are capped by
// cap tanh(score / cap), with `before` = scale / cap and `scale` = cap, they fall behind that by slopes[h] for each row that a key lies
// back, or each head has a sink, a score that nothing belongs to. `scale` includes log2(e).
//
// A block makes tiles of 64 rows for each of its warpgroups but the last, whose first thread has the copy engine fetch a tile of q and
// then blocks of Plan::keys rows of k and v into rings, swizzled by 128 bytes as the tensor cores read them (wgmma.cuh). `full` says that
// a place has arrived, `free` that every warp has waited for the products that read it. Blocks of keys come from the last to the first, so
// that those which need the mask come first. A warpgroup issues the scores of the next block and the products of this one with v
// together, and turns scores into weights while the latter run; the warpgroups take turns at that (named barriers), so that one's
// exponentials run beside the other's products. Blocks stay and take tile after tile, longest first, in an order that goes back and
// forth over the blocks so that all end alike.
// Wins for chunks of many rows: one launch over any length, nothing to merge, and nothing that a library would prepare for each length.
// Source of the schedule: Shah et al., "FlashAttention-3", arXiv:2407.08608, sections 3.1 and 3.2.
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/quads.cuh>
#include <agentcompile/wgmma.cuh>

#include "plan.cuh"

namespace {

using T = Plan::T;
constexpr int dim = Plan::dim;              // channels of q and k
constexpr int value_dim = Plan::value_dim;  // and of v
constexpr int keys = Plan::keys;      // rows of k and v at a time
constexpr int stages = Plan::stages;  // places of either ring
constexpr int groups = Plan::groups;  // warpgroups that multiply
constexpr int rows = groups * 64;     // of a tile of q
constexpr int panels = dim / wg::span;
constexpr int value_panels = value_dim / wg::span;
constexpr int panel_elements = wg::panel_spans * wg::span;
constexpr float log2_e = 1.4426950408889634f;
constexpr int q_elements = rows * dim;
constexpr int k_elements = keys * dim;
constexpr int v_elements = keys * value_dim;
static_assert(dim % wg::span == 0 && value_dim % wg::span == 0 && keys % wg::panel_spans == 0, "whole spans and panels");

// What the launch says of the chunk.
struct Chunk {
  int count, start, heads, tiles, window;
};

// The rows of one head that a block makes, and the blocks of keys that they see: from `first` on, up to `blocks`.
struct Tile {
  int row, head, first, blocks;

  // The one of this block in its `turn`; `blocks` is 0 behind the last one.
  static __device__ __forceinline__ Tile at(int turn, const Chunk& chunk) {
    const int place = turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int number = turn * gridDim.x + place;
    if (number >= chunk.tiles) return {0, 0, 0, 0};
    const int row = ((chunk.count - 1) / rows - number / chunk.heads) * rows;
    const int seen = chunk.start + min(row + rows, chunk.count);
    const int first = Plan::windowed ? max(chunk.start + row - chunk.window + 1, 0) / keys : 0;
    return {row, number % chunk.heads, first, (seen + keys - 1) / keys};
  }
};

__device__ __forceinline__ float minus_infinity() { return __int_as_float(static_cast<int>(0xff800000u)); }

// The two rows of a thread on their way through the keys: greatest score and sum of exponentials of this thread's columns.
struct Softmax {
  float most[2] = {minus_infinity(), minus_infinity()};
  float sum[2] = {0.0f, 0.0f};

  // Turns scores into exponentials; `factor` is what everything before has to be multiplied by. `scale` includes log2(e).
  __device__ __forceinline__ void take(float (&s)[keys / 2], float (&factor)[2], float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float found = most[h];
#pragma unroll
      for (int i = 0; i < keys / 2; i += 4) found = fmaxf(found, fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
      found = fmaxf(found, __shfl_xor_sync(0xffffffffu, found, 1));
      found = fmaxf(found, __shfl_xor_sync(0xffffffffu, found, 2));
      const float reach = found == minus_infinity() ? 0.0f : found;  // no key of these was seen
      const float shift = reach * scale;
      factor[h] = ac::quick_exp2((most[h] - reach) * scale);  // exactly 1 where the maximum stays, whatever the compiler fuses
      most[h] = found;
      float added = 0.0f;
#pragma unroll
      for (int i = 0; i < keys / 2; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& one = s[i + 2 * h + e];
          one = ac::quick_exp2(fmaf(one, scale, -shift));
          added += one;
        }
      }
      sum[h] = sum[h] * factor[h] + added;
    }
  }

  // The sum of a row, of all columns.
  __device__ __forceinline__ float total(int h) const {
    float found = sum[h] + __shfl_xor_sync(0xffffffffu, sum[h], 1);
    return found + __shfl_xor_sync(0xffffffffu, found, 2);
  }
};

// Scores of keys behind a thread's rows, and of those before their windows, are -inf. `ahead`: how far the block's first key is behind
// (below 0: before) the thread's first row.
__device__ __forceinline__ void mask(float (&s)[keys / 2], int ahead, int window) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < keys / 2; ++i) {
    const int h = i % 4 / 2, behind = ahead + i / 4 * 8 + column + i % 2 - 8 * h;
    if (behind > 0 || (Plan::windowed && behind <= -window)) s[i] = minus_infinity();
  }
}

// tanh(before * score), by one exponential and one reciprocal of the hardware's.
__device__ __forceinline__ void cap(float (&s)[keys / 2], float before) {
  constexpr float twice_log2_e = 2.8853900817779268f;
#pragma unroll
  for (int i = 0; i < keys / 2; ++i) {
    s[i] = 1.0f - 2.0f * ac::quick_reciprocal(1.0f + ac::quick_exp2(s[i] * before * twice_log2_e));
  }
}

// Scores fall with the distance of their keys; `slope` is what they fall by over the scale.
__device__ __forceinline__ void slant(float (&s)[keys / 2], int ahead, float slope) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < keys / 2; ++i) {
    const int behind = ahead + i / 4 * 8 + column + i % 2 - 8 * (i % 4 / 2);
    s[i] = fmaf(slope, static_cast<float>(behind), s[i]);
  }
}

__device__ __forceinline__ void weights_of(const float (&s)[keys / 2], unsigned (&weights)[keys / 16][4]) {
#pragma unroll
  for (int i = 0; i < keys / 4; ++i) weights[i / 4][i % 4] = ac::packed<T>(s[2 * i], s[2 * i + 1]);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads, 1)
attend_rows(const __grid_constant__ wg::Tiles q, const __grid_constant__ wg::Tiles k, const __grid_constant__ wg::Tiles v,
            const T* sinks, const float* slopes, T* out, int count, int start, int heads, int share, int tiles, int window, int channels,
            float scale, float before, long long out_row, long long out_head) {
  WG_DYNAMIC_SHARED(shared_bytes);
  T* const q_place = reinterpret_cast<T*>(shared_bytes);
  T* const k_ring = q_place + q_elements;
  T* const v_ring = k_ring + stages * k_elements;
  ac::Mbarrier* const q_full = reinterpret_cast<ac::Mbarrier*>(v_ring + stages * v_elements);
  ac::Mbarrier* const q_free = q_full + 1;
  ac::Mbarrier* const k_full = q_free + 1;
  ac::Mbarrier* const k_free = k_full + stages;
  ac::Mbarrier* const v_full = k_free + stages;
  ac::Mbarrier* const v_free = v_full + stages;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const Chunk chunk{count, start, heads, tiles, window};
  if (threadIdx.x == 0) {
    wg::prefetch(q);
    wg::prefetch(k);
    wg::prefetch(v);
    ac::mbarrier_init(q_full, 1);
    ac::mbarrier_init(q_free, groups * 4);
    for (int stage = 0; stage < stages; ++stage) {
      ac::mbarrier_init(k_full + stage, 1);
      ac::mbarrier_init(k_free + stage, groups * 4);
      ac::mbarrier_init(v_full + stage, 1);
      ac::mbarrier_init(v_free + stage, groups * 4);
    }
    ac::mbarrier_init_fence();
  }
  __syncthreads();

  if (group == groups) {
    wg::shrink_registers<Plan::copier_registers>();
    if (threadIdx.x == groups * 128) {
      wg::Turn<stages> turn;
      for (int round = 0;; ++round) {
        const Tile tile = Tile::at(round, chunk);
        if (tile.blocks == 0) break;
        ac::mbarrier_wait(q_free, round % 2 ^ 1);
        ac::mbarrier_arrive_expect_bytes(q_full, q_elements * sizeof(T));
#pragma unroll
        for (int p = 0; p < panels; ++p) {
          wg::fetch<1>(q_place + p * rows * wg::span, q, p * wg::span, tile.row, tile.head, 0, q_full, 1);
        }
        for (int block = tile.blocks - 1; block >= tile.first; --block) {
          const int head = tile.head / share;
          ac::mbarrier_wait(k_free + turn.stage, turn.parity ^ 1);
          ac::mbarrier_arrive_expect_bytes(k_full + turn.stage, k_elements * sizeof(T));
#pragma unroll
          for (int p = 0; p < panels; ++p) {
            wg::fetch<1>(k_ring + turn.stage * k_elements + p * keys * wg::span, k, p * wg::span, block * keys, head, 0,
                         k_full + turn.stage, 1);
          }
          ac::mbarrier_wait(v_free + turn.stage, turn.parity ^ 1);
          ac::mbarrier_arrive_expect_bytes(v_full + turn.stage, v_elements * sizeof(T));
#pragma unroll
          for (int part = 0; part < keys / wg::panel_spans; ++part) {
#pragma unroll
            for (int p = 0; p < value_panels; ++p) {
              wg::fetch<1>(v_ring + turn.stage * v_elements + (part * value_panels + p) * panel_elements, v, p * wg::span,
                           block * keys + part * wg::panel_spans, head, 0, v_full + turn.stage, 1);
            }
          }
          turn.next();
        }
      }
    }
    __syncwarp();
    return;
  }

  wg::grow_registers<Plan::registers>();
  const int lane = threadIdx.x % 32;
  const int warp_row = group * 64 + threadIdx.x / 32 % 4 * 16;
  constexpr int first_turn = 1;  // named barriers, one for each warpgroup: it comes, and the one before it
  const auto release = [&](ac::Mbarrier* barrier) {
    if (lane == 0) ac::mbarrier_arrive(barrier);
  };
  const auto multiply_keys = [&](float (&s)[keys / 2], int stage) {
    const unsigned long long left = wg::descriptor(q_place + group * 64 * wg::span);
    const unsigned long long right = wg::descriptor(k_ring + stage * k_elements);
#pragma unroll
    for (int p = 0; p < panels; ++p) {
#pragma unroll
      for (int t = 0; t < wg::span / 16; ++t) {
        const unsigned long long a = left + p * (rows * 128 / 16) + t * wg::next_terms<true>;
        const unsigned long long b = right + p * (keys * 128 / 16) + t * wg::next_terms<true>;
        if (p == 0 && t == 0) {
          wg::multiply<T, keys, true, true, false>(s, a, b);
        } else {
          wg::multiply<T, keys, true, true>(s, a, b);
        }
      }
    }
    wg::commit();
  };
  const auto add_values = [&](float (&o)[value_dim / 2], const unsigned (&weights)[keys / 16][4], int stage) {
    const unsigned long long right = wg::descriptor(v_ring + stage * v_elements);
#pragma unroll
    for (int c = 0; c < keys / 16; ++c) {
      const int part = c / (wg::panel_spans / 16), t = c % (wg::panel_spans / 16);
      wg::multiply<T, value_dim, false>(o, weights[c], right + part * (value_panels * panel_elements * 2 / 16) + t * wg::next_terms<false>);
    }
    wg::commit();
  };

  if (group == groups - 1) ac::named_barrier_arrive(first_turn, 256);
  wg::Turn<stages> k_turn, v_turn;
  for (int round = 0;; ++round) {
    const Tile tile = Tile::at(round, chunk);
    if (tile.blocks == 0) break;
    float s[keys / 2], o[value_dim / 2] = {}, factor[2];
    unsigned weights[keys / 16][4];
    Softmax softmax;
    const int first_row = start + tile.row + warp_row + lane / 4;  // of this thread, among the keys
    const auto masked = [&](int block) {
      const bool begins_before = Plan::windowed && block * keys <= start + tile.row + group * 64 + 63 - window;
      return (block + 1) * keys > start + tile.row + group * 64 + 1 || begins_before;
    };
    const auto weigh = [&](int block) {
      if constexpr (Plan::capped) cap(s, before);
      if constexpr (Plan::slopes) slant(s, block * keys - first_row, slopes[tile.head] * log2_e / scale);
      if (masked(block)) mask(s, block * keys - first_row, window);
      softmax.take(s, factor, scale);
    };

    ac::mbarrier_wait(q_full, round % 2);
    ac::mbarrier_wait(k_full + k_turn.stage, k_turn.parity);
    wg::fence();
    multiply_keys(s, k_turn.stage);
    wg::wait<0>();
    wg::settle(s);
    release(k_free + k_turn.stage);
    k_turn.next();
    weigh(tile.blocks - 1);
    weights_of(s, weights);

    for (int block = tile.blocks - 2; block >= tile.first; --block) {
      ac::mbarrier_wait(k_full + k_turn.stage, k_turn.parity);
      ac::named_barrier_sync(first_turn + group, 256);
      wg::fence();
      multiply_keys(s, k_turn.stage);
      ac::mbarrier_wait(v_full + v_turn.stage, v_turn.parity);
      add_values(o, weights, v_turn.stage);
      ac::named_barrier_arrive(first_turn + (group + 1) % groups, 256);
      wg::wait<1>();
      wg::settle(s);
      release(k_free + k_turn.stage);
      k_turn.next();
      weigh(block);
      wg::wait<0>();
      wg::settle(o);
      release(v_free + v_turn.stage);
      v_turn.next();
      weights_of(s, weights);
#pragma unroll
      for (int i = 0; i < value_dim / 2; ++i) o[i] *= factor[i % 4 / 2];
    }
    release(q_free);
    ac::mbarrier_wait(v_full + v_turn.stage, v_turn.parity);
    wg::fence();
    add_values(o, weights, v_turn.stage);
    wg::wait<0>();
    wg::settle(o);
    release(v_free + v_turn.stage);
    v_turn.next();

#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float total = softmax.total(h);
      if constexpr (Plan::sinks) total += ac::quick_exp2(ac::to_float(sinks[tile.head]) * log2_e - softmax.most[h] * scale);
      const float share_of_one = 1.0f / total;
      const int row = tile.row + warp_row + 8 * h + lane / 4;
#pragma unroll
      for (int j = 0; j < value_dim / 8; j += 4) {
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const pair = o + 4 * (j + i) + 2 * h;
          words[i] = ac::packed<T>(pair[0] * share_of_one, pair[1] * share_of_one);
        }
        ac::transpose(words);
        if (row < count && 8 * (j + lane % 4) < channels) {
          *reinterpret_cast<uint4*>(out + row * out_row + tile.head * out_head + 8 * (j + lane % 4)) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
}
