// Decode attention of one layer in one launch, fp32 FMA: q/k RMS norm, RoPE, append of the new position, split-KV softmax
// with GQA packing, merge.
//
// Layouts: q [query heads * D]; out the same with V's width Dv; k [kv_heads * D]; v [kv_heads * Dv]; caches [capacity,
// kv_heads, D or Dv]; cos, sin [rotary_dim];
// position: the index of the token being decoded, so the length is position + 1. Grid (splits, kv_heads, parts).
// A group of `lanes` lanes owns a cached position: each lane loads 16-byte vectors of K and V, and all query heads of the block
// (a KV head's, or one part of them: decode_attention.cuh) use them. The positions are dealt out to the splits in tiles, round
// robin: short contexts keep few blocks busy, the others leave after the dependency wait, and no division depends on the length.
// Norm and RoPE of q are computed by every lane group while its K and V are in flight; k's only in the blocks whose tile holds
// `position`, which use it from registers, and one of which appends it. The last block to finish merges the splits in order, or
// (Plan::cluster) the splits are a thread-block cluster and put their results into each other's shared memory (sm_90): stores and
// a cluster barrier, or (Plan::messages) messages whose bytes the block that merges them waits for.
// Wins for fp32, for one or two query heads per KV head, and where there are no tensor cores (see attention_tensor.cu).
#include <agentcompile/head.cuh>
#include <agentcompile/split.cuh>
#include "decode_attention.cuh"

namespace {

constexpr int lanes = Plan::lanes;    // lanes per position
using Head = ac::Head<T, head_dim, lanes>;        // of Q and K
using ValueHead = ac::Head<T, value_dim, lanes>;  // of V
constexpr int groups_per_block = Plan::threads / lanes;
constexpr int tile = groups_per_block * unroll;  // positions per block and round

using Keys = Head::Packed[unroll];
using Values = ValueHead::Packed[unroll];

// Softmax of one lane group over its positions; scores in units of log2.
struct Running {
  float maximum[group];
  float sum[group];
  ValueHead::Slice weighted[group];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int g = 0; g < group; ++g) {
      maximum[g] = ac::softmax_floor;
      sum[g] = 0.0f;
#pragma unroll
      for (int e = 0; e < ValueHead::elements; ++e) weighted[g][e] = 0.0f;
    }
  }

  // Turns scores into weights relative to the new maximum; attended[u] says whether position u counts.
  __device__ __forceinline__ void weigh(float (&scores)[unroll][group], const bool (&attended)[unroll]) {
#pragma unroll
    for (int g = 0; g < group; ++g) {
      float highest = maximum[g];
#pragma unroll
      for (int u = 0; u < unroll; ++u) highest = attended[u] ? fmaxf(highest, scores[u][g]) : highest;
      const float rescale = ac::quick_exp2(maximum[g] - highest);
      maximum[g] = highest;
      sum[g] *= rescale;
#pragma unroll
      for (int e = 0; e < ValueHead::elements; ++e) weighted[g][e] *= rescale;
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        scores[u][g] = attended[u] ? ac::quick_exp2(scores[u][g] - highest) : 0.0f;
        sum[g] += scores[u][g];
      }
    }
  }

  __device__ __forceinline__ void add(const float (&weights)[unroll][group], const Values& values) {
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      ValueHead::Slice value;
      ValueHead::unpack(values[u], value);
#pragma unroll
      for (int g = 0; g < group; ++g) {
#pragma unroll
        for (int e = 0; e < ValueHead::elements; ++e) weighted[g][e] = fmaf(weights[u][g], value[e], weighted[g][e]);
      }
    }
  }

  // Combines the lane groups of the warp; every group gets the result.
  __device__ __forceinline__ void combine_warp() {
#pragma unroll
    for (int offset = lanes; offset < ac::warp_size; offset *= 2) {
#pragma unroll
      for (int g = 0; g < group; ++g) {
        const float other_maximum = __shfl_xor_sync(ac::full_warp, maximum[g], offset);
        const float other_sum = __shfl_xor_sync(ac::full_warp, sum[g], offset);
        const float highest = fmaxf(maximum[g], other_maximum);
        const float own_weight = ac::quick_exp2(maximum[g] - highest);
        const float other_weight = ac::quick_exp2(other_maximum - highest);
        maximum[g] = highest;
        sum[g] = sum[g] * own_weight + other_sum * other_weight;
#pragma unroll
        for (int e = 0; e < ValueHead::elements; ++e) {
          const float other = __shfl_xor_sync(ac::full_warp, weighted[g][e], offset);
          weighted[g][e] = weighted[g][e] * own_weight + other * other_weight;
        }
      }
    }
  }

  __device__ __forceinline__ void store(float (&outputs)[group * value_dim], float2 (&states)[group], int lane) const {
#pragma unroll
    for (int g = 0; g < group; ++g) {
      if (lane == 0) states[g] = make_float2(maximum[g], sum[g]);
#pragma unroll
      for (int j = 0; j < ValueHead::vectors; ++j) {
        const int vector = lane + j * lanes;
        if (!ValueHead::inside(vector)) continue;
#pragma unroll
        for (int e = 0; e < Head::Vector::size; ++e) {
          outputs[g * value_dim + vector * Head::Vector::size + e] = weighted[g][j * Head::Vector::size + e];
        }
      }
    }
  }
};

// This lane's part of q . k for every position of the tile and query head, not yet summed over the lanes.
__device__ __forceinline__ void multiply(const Head::Slice (&query)[group], const Keys& keys, float (&scores)[unroll][group]) {
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    Head::Slice key;
    Head::unpack(keys[u], key);
#pragma unroll
    for (int g = 0; g < group; ++g) {
      scores[u][g] = 0.0f;
#pragma unroll
      for (int e = 0; e < Head::elements; ++e) scores[u][g] = fmaf(query[g][e], key[e], scores[u][g]);
    }
  }
}

}  // namespace

// Parts ask for one block per SM at the least, or the compiler spills some of their registers to have room for one more.
extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::parts > 1 ? 1 : 0)
attention_kernel(const Plan::T* q, const Plan::T* k, const Plan::T* v, const Plan::T* q_norm, const Plan::T* k_norm,
                 const Plan::T* cos, const Plan::T* sin, Plan::T* k_cache, Plan::T* v_cache, const long long* position,
                 const Plan::Sink* sinks, Plan::T* out, float* workspace, unsigned int* counters, int capacity,
                 float scale, float norm_eps, int window, float softcap) {
  __shared__ __align__(16) float warp_outputs[warps][group * value_dim];
  __shared__ float2 warp_states[warps][group];
  __shared__ bool last;
  __shared__ Parts parts;

  const Operands operands{q, k, v, q_norm, k_norm, cos, sin, k_cache, v_cache, position, sinks, out, workspace, counters,
                          capacity, scale, norm_eps, window, softcap};
  if (Plan::pdl) ac::launch_dependents();
  parts.open();
  const int lane = threadIdx.x % lanes;
  const int group_in_block = threadIdx.x / lanes;
  const int split = blockIdx.x;
  const int splits = split_count();
  const int kv_head = blockIdx.y;
  const Share share{kv_head};

  Head::Packed q_weight, k_weight;
  if constexpr (Plan::qk_norm != ac::norm_none) {
    Head::load(q_weight, q_norm, lane);
    Head::load(k_weight, k_norm, lane);
  }

  T* key_base = k_cache + kv_head * head_dim;
  T* value_base = v_cache + kv_head * value_dim;
  const int attended = Plan::has_window ? window : 0;
  ac::Span span;
  Keys keys;
  Values values;
  auto position_of = [&](int base, int u) { return base + u * groups_per_block + group_in_block; };
  auto load_tile = [&](auto& packed, const T* cache, long long row, int base, auto load) {
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const int index = position_of(base, u);
      load(packed[u], cache + index * row, lane, span.is_cached(index));
    }
  };
  auto load_key = [](Head::Packed& packed, const T* head, int at, bool wanted) { Head::load(packed, head, at, wanted); };
  auto load_value = [](ValueHead::Packed& packed, const T* head, int at, bool wanted) { ValueHead::load(packed, head, at, wanted); };

  if constexpr (Plan::early_kv) {
    span = ac::span_of<tile, Plan::chunk>(ac::load_hint(position), capacity, attended, splits);
    load_tile(keys, key_base, key_row, span.first + split * tile, Head::load_settled);
    load_tile(values, value_base, value_row, span.first + split * tile, ValueHead::load_settled);
  }
  parts.opened();
  ac::grid_dependency_wait();

  const long long new_position = ac::load_relaxed(position);
  Head::Packed query_bits[group], cosine, sine, new_key;
  ValueHead::Packed new_value;
#pragma unroll
  for (int g = 0; g < group; ++g) Head::load(query_bits[g], q + (share.first_head() + g) * head_dim, lane);
  if constexpr (Plan::rotary_dim > 0) {
    Head::load(cosine, cos, lane, true, Plan::rotary_dim / Head::Vector::size);
    Head::load(sine, sin, lane, true, Plan::rotary_dim / Head::Vector::size);
  }
  Head::load(new_key, k + kv_head * head_dim, lane);
  ValueHead::load(new_value, v + kv_head * value_dim, lane);
  if (!Plan::early_kv || new_position != span.position) {
    span = ac::span_of<tile, Plan::chunk>(new_position, capacity, attended, splits);
    if (split < span.active) {
      load_tile(keys, key_base, key_row, span.first + split * tile, load_key);
      load_tile(values, value_base, value_row, span.first + split * tile, load_value);
    }
  }
  if (split >= span.active) return;
  parts.expect(span.active);
  const int start = span.first + split * tile;
  const int stride = splits * tile;

  const bool capped = Plan::has_softcap && softcap > 0.0f;
  const float query_scale = capped ? scale / softcap : scale * log2_e;
  Head::Slice query[group];
#pragma unroll
  for (int g = 0; g < group; ++g) {
    Head::unpack(query_bits[g], query[g]);
    Head::norm<Plan::qk_norm>(query[g], q_weight, norm_eps);
    Head::rotate<Plan::rotary_dim, Plan::interleaved>(query[g], cosine, sine, lane);
#pragma unroll
    for (int e = 0; e < Head::elements; ++e) query[g][e] = ac::round_to<T>(query[g][e]) * query_scale;
  }
  if ((span.position - span.first) / tile % splits == split) {  // this block's tile holds the new position
    Head::Slice key;
    Head::unpack(new_key, key);
    Head::norm<Plan::qk_norm>(key, k_weight, norm_eps);
    Head::rotate<Plan::rotary_dim, Plan::interleaved>(key, cosine, sine, lane);
    Head::pack(key, new_key);
  }

  Running running;
  running.clear();
  for (int base = start; base < span.length; base += stride) {
    bool counts[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const int index = position_of(base, u);
      counts[u] = index < span.length;
      if (counts[u] && index == span.position) {
        if (share.appends()) {
          Head::store(new_key, key_base + index * key_row, lane);
          ValueHead::store(new_value, value_base + index * value_row, lane);
        }
#pragma unroll
        for (int j = 0; j < Head::vectors; ++j) keys[u][j] = new_key[j];
#pragma unroll
        for (int j = 0; j < ValueHead::vectors; ++j) values[u][j] = new_value[j];
      }
    }
    float scores[unroll][group];
    multiply(query, keys, scores);
    const bool more = base + stride < span.length;
    if (more) load_tile(keys, key_base, key_row, base + stride, load_key);
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
#pragma unroll
      for (int g = 0; g < group; ++g) {
        scores[u][g] = ac::warp_sum<lanes>(scores[u][g]);
        if (capped) scores[u][g] = softcap * log2_e * tanhf(scores[u][g]);
        if constexpr (Plan::has_alibi) {
          scores[u][g] += Alibi::slope(share.first_head() + g) * static_cast<float>(position_of(base, u) - span.position);
        }
      }
    }
    running.weigh(scores, counts);
    running.add(scores, values);
    if (more) load_tile(values, value_base, value_row, base + stride, load_value);
  }
  running.combine_warp();
  if (threadIdx.x % ac::warp_size < lanes) {
    const int warp = threadIdx.x / ac::warp_size;
    running.store(warp_outputs[warp], warp_states[warp], lane);
  }

  merge(operands, share, span.active, WarpOutputs{warp_outputs}, Buffers{warp_states, parts, &last});
}
