// Decode attention of one layer in one launch, fp32 FMA: q/k RMS norm, RoPE, append of the new position, split-KV softmax
// with GQA packing, merge.
//
// Layouts: q, out [kv_heads * group * D]; k, v [kv_heads * D]; caches [capacity, kv_heads, D]; cos, sin [rotary_dim];
// position: the index of the token being decoded, so the length is position + 1. Grid (splits, kv_heads).
// A group of `lanes` lanes owns a cached position: each lane loads 16-byte vectors of K and V, and all query heads of the KV
// head use them. The positions are dealt out to the splits in tiles, round robin: short contexts keep few blocks busy, the
// others leave after the dependency wait, and no division depends on the length. Norm and RoPE of q are computed by every
// lane group while its K and V are in flight; k's only in the block whose tile holds `position`, which appends it and uses
// it from registers. The last block to finish merges the splits in order.
// Wins for fp32, for wide heads with one or two query heads per KV head, and where tensor cores are absent.
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/row.cuh>
#include <agentcompile/split.cuh>
#include "plan.cuh"

namespace {

using T = Plan::T;
using Vector = ac::Vec16<T>;
constexpr int head_dim = Plan::head_dim;
constexpr int group = Plan::group;                                        // query heads per KV head
constexpr int lanes = Plan::lanes;                                        // lanes per position, a power of two
constexpr int unroll = Plan::unroll;                                      // positions in flight per lane group
constexpr int head_vectors = head_dim / Vector::size;
constexpr int vectors = (head_vectors + lanes - 1) / lanes;               // per lane and position
constexpr int elements = vectors * Vector::size;
constexpr bool padded = vectors * lanes != head_vectors;
constexpr int warps = Plan::threads / ac::warp_size;
constexpr int groups_per_warp = ac::warp_size / lanes;
constexpr int groups_per_block = warps * groups_per_warp;
constexpr int tile = groups_per_block * unroll;                           // positions per block and round
constexpr float log2_e = 1.4426950408889634f;

// A lane's share of a head: vector j of lane l is vector l + j * lanes of the head.
using Packed = Vector[vectors];
using Slice = float[elements];

__device__ __forceinline__ bool in_head(int vector) { return !padded || vector < head_vectors; }

__device__ __forceinline__ void load_head(Packed& slice, const T* head, int lane, bool wanted) {
#pragma unroll
  for (int j = 0; j < vectors; ++j) {
    const int vector = lane + j * lanes;
    slice[j] = Vector::zero();
    if (wanted && in_head(vector)) slice[j].bits = ac::load_stream16(head + vector * Vector::size);
  }
}

__device__ __forceinline__ void store_head(const Packed& slice, T* head, int lane) {
#pragma unroll
  for (int j = 0; j < vectors; ++j) {
    const int vector = lane + j * lanes;
    if (in_head(vector)) slice[j].store(head + vector * Vector::size);
  }
}

__device__ __forceinline__ void unpack(const Packed& packed, Slice& values) {
#pragma unroll
  for (int j = 0; j < vectors; ++j) {
    float eight[Vector::size];
    packed[j].unpack(eight);
#pragma unroll
    for (int e = 0; e < Vector::size; ++e) values[j * Vector::size + e] = eight[e];
  }
}

__device__ __forceinline__ void pack(const Slice& values, Packed& packed) {
#pragma unroll
  for (int j = 0; j < vectors; ++j) {
    float eight[Vector::size];
#pragma unroll
    for (int e = 0; e < Vector::size; ++e) eight[e] = values[j * Vector::size + e];
    packed[j] = Vector::pack(eight);
  }
}

__device__ __forceinline__ void norm_head(Slice& values, const Packed& weight, float eps) {
  float squares = 0.0f;
#pragma unroll
  for (int e = 0; e < elements; ++e) squares = fmaf(values[e], values[e], squares);
  const float mean_square = ac::warp_sum<lanes>(squares) / static_cast<float>(head_dim);
  const ac::RowStatistics row{0.0f, ac::inverse_root(mean_square, eps)};
  Slice scale;
  unpack(weight, scale);
#pragma unroll
  for (int e = 0; e < elements; ++e) values[e] = ac::normalize<Plan::qk_norm, T>(values[e], row, scale[e], 0.0f);
}

// Element `e` of vector `vector` of the head, from whichever lane of the group holds it.
__device__ __forceinline__ float from_vector(const Slice& values, int vector, int e) {
  float found = 0.0f;
#pragma unroll
  for (int j = 0; j < vectors; ++j) {
    const float candidate = __shfl_sync(ac::full_warp, values[j * Vector::size + e], vector % lanes, lanes);
    if (vectors == 1 || vector / lanes == j) found = candidate;
  }
  return found;
}

__device__ __forceinline__ void rotate_head(Slice& values, const Packed& cosine, const Packed& sine, int lane) {
  constexpr int half_vectors = Plan::rotary_dim / 2 / Vector::size;
  Slice cosines, sines, partners;
  unpack(cosine, cosines);
  unpack(sine, sines);
#pragma unroll
  for (int j = 0; j < vectors; ++j) {
    const int vector = lane + j * lanes;
    const int partner = vector < half_vectors ? vector + half_vectors : vector - half_vectors;
#pragma unroll
    for (int e = 0; e < Vector::size; ++e) {
      const int i = j * Vector::size + e;
      if constexpr (half_vectors % lanes == 0) {  // the partner is in the same lane
        constexpr int distance = half_vectors / lanes;
        partners[i] = values[(j < distance ? j + distance : j - distance) * Vector::size + e];
      } else {
        partners[i] = from_vector(values, partner < 0 ? 0 : partner, e);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < vectors; ++j) {
    const int vector = lane + j * lanes;
    if (vector >= 2 * half_vectors) continue;  // beyond the rotary part
#pragma unroll
    for (int e = 0; e < Vector::size; ++e) {
      const int i = j * Vector::size + e;
      values[i] = ac::rope_rotate(values[i], partners[i], cosines[i], sines[i], vector >= half_vectors);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
attention_kernel(const Plan::T* q, const Plan::T* k, const Plan::T* v, const Plan::T* q_norm, const Plan::T* k_norm,
                 const Plan::T* cos, const Plan::T* sin, Plan::T* k_cache, Plan::T* v_cache, const long long* position,
                 const Plan::Sink* sinks, Plan::T* out, float* workspace, unsigned int* counters, int kv_heads, int capacity,
                 float scale, float norm_eps, int window, float softcap) {
  __shared__ float warp_outputs[warps][group * head_dim];
  __shared__ float2 warp_states[warps][group];
  __shared__ bool last;

  if (Plan::pdl) ac::launch_dependents();
  const int warp = threadIdx.x / ac::warp_size;
  const int lane = threadIdx.x % lanes;
  const int group_in_block = threadIdx.x / lanes;
  const int split = blockIdx.x;
  const int kv_head = blockIdx.y;

  Packed q_weight, k_weight;
  if constexpr (Plan::qk_norm != ac::norm_none) {
    load_head(q_weight, q_norm, lane, true);
    load_head(k_weight, k_norm, lane, true);
  }
  if (Plan::pdl) ac::grid_dependency_wait();

  const long long appended = ac::load_relaxed(position);
  Packed query_bits[group];
#pragma unroll
  for (int g = 0; g < group; ++g) {
    load_head(query_bits[g], q + static_cast<long long>(kv_head * group + g) * head_dim, lane, true);
  }
  Packed cosine, sine;
  if constexpr (Plan::rotary_dim > 0) {
    constexpr int rotary_vectors = Plan::rotary_dim / Vector::size;
#pragma unroll
    for (int j = 0; j < vectors; ++j) {
      const int vector = lane + j * lanes;
      cosine[j] = sine[j] = Vector::zero();
      if (vector < rotary_vectors) {
        cosine[j].bits = ac::load_stream16(cos + vector * Vector::size);
        sine[j].bits = ac::load_stream16(sin + vector * Vector::size);
      }
    }
  }
  Packed new_key, new_value;
  load_head(new_key, k + static_cast<long long>(kv_head) * head_dim, lane, true);
  load_head(new_value, v + static_cast<long long>(kv_head) * head_dim, lane, true);

  // Positions first .. length - 1 are attended to; the caller checks the capacity, here it only keeps memory safe.
  const int new_position = static_cast<int>(appended);
  const int length = min(new_position + 1, capacity);
  const int first = Plan::has_window && window > 0 ? max(0, length - window) : 0;
  const int active_splits = min((length - first + tile - 1) / tile, static_cast<int>(gridDim.x));
  if (split >= active_splits) return;

  const long long row = static_cast<long long>(kv_heads) * head_dim;
  T* key_base = k_cache + static_cast<long long>(kv_head) * head_dim;
  T* value_base = v_cache + static_cast<long long>(kv_head) * head_dim;
  const int stride = tile * static_cast<int>(gridDim.x);
  const int start = first + split * tile;
  Packed keys[unroll], values[unroll];
  auto load_keys = [&](int base) {
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const int cached = base + u * groups_per_block + group_in_block;
      load_head(keys[u], key_base + cached * row, lane, cached < length && cached != new_position);
    }
  };
  auto load_values = [&](int base) {
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const int cached = base + u * groups_per_block + group_in_block;
      load_head(values[u], value_base + cached * row, lane, cached < length && cached != new_position);
    }
  };
  load_keys(start);
  load_values(start);

  // Scores are in units of log2: softmax weights are then 2^(score - maximum).
  const bool capped = Plan::has_softcap && softcap > 0.0f;
  const float query_scale = capped ? scale / softcap : scale * log2_e;
  Slice query[group];
#pragma unroll
  for (int g = 0; g < group; ++g) {
    unpack(query_bits[g], query[g]);
    if constexpr (Plan::qk_norm != ac::norm_none) norm_head(query[g], q_weight, norm_eps);
    if constexpr (Plan::rotary_dim > 0) rotate_head(query[g], cosine, sine, lane);
#pragma unroll
    for (int e = 0; e < elements; ++e) query[g][e] = ac::round_to<T>(query[g][e]) * query_scale;
  }
  if (((new_position - first) / tile) % static_cast<int>(gridDim.x) == split) {  // this block appends
    Slice key;
    unpack(new_key, key);
    if constexpr (Plan::qk_norm != ac::norm_none) norm_head(key, k_weight, norm_eps);
    if constexpr (Plan::rotary_dim > 0) rotate_head(key, cosine, sine, lane);
    pack(key, new_key);
  }

  float maximum[group], sum[group];
  Slice weighted[group];
#pragma unroll
  for (int g = 0; g < group; ++g) {
    maximum[g] = ac::softmax_floor;
    sum[g] = 0.0f;
#pragma unroll
    for (int e = 0; e < elements; ++e) weighted[g][e] = 0.0f;
  }

  for (int base = start; base < length; base += stride) {
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const int cached = base + u * groups_per_block + group_in_block;
      if (cached == new_position && cached < length) {
        store_head(new_key, key_base + cached * row, lane);
        store_head(new_value, value_base + cached * row, lane);
#pragma unroll
        for (int j = 0; j < vectors; ++j) {
          keys[u][j] = new_key[j];
          values[u][j] = new_value[j];
        }
      }
    }
    float scores[unroll][group];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      Slice key;
      unpack(keys[u], key);
#pragma unroll
      for (int g = 0; g < group; ++g) {
        float product = 0.0f;
#pragma unroll
        for (int e = 0; e < elements; ++e) product = fmaf(query[g][e], key[e], product);
        scores[u][g] = product;
      }
    }
    if (base + stride < length) load_keys(base + stride);
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
#pragma unroll
      for (int g = 0; g < group; ++g) {
        scores[u][g] = ac::warp_sum<lanes>(scores[u][g]);
        if (capped) scores[u][g] = softcap * log2_e * tanhf(scores[u][g]);
      }
    }
#pragma unroll
    for (int g = 0; g < group; ++g) {
      float highest = maximum[g];
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        const bool attended = base + u * groups_per_block + group_in_block < length;
        highest = attended ? fmaxf(highest, scores[u][g]) : highest;
      }
      const float rescale = exp2f(maximum[g] - highest);
      maximum[g] = highest;
      sum[g] *= rescale;
#pragma unroll
      for (int e = 0; e < elements; ++e) weighted[g][e] *= rescale;
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        const bool attended = base + u * groups_per_block + group_in_block < length;
        scores[u][g] = attended ? exp2f(scores[u][g] - highest) : 0.0f;
        sum[g] += scores[u][g];
      }
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      Slice value;
      unpack(values[u], value);
#pragma unroll
      for (int g = 0; g < group; ++g) {
#pragma unroll
        for (int e = 0; e < elements; ++e) weighted[g][e] = fmaf(scores[u][g], value[e], weighted[g][e]);
      }
    }
    if (base + stride < length) load_values(base + stride);
  }

  // The lane groups of a warp, then the warps of the block, then the splits.
#pragma unroll
  for (int offset = lanes; offset < ac::warp_size; offset *= 2) {
#pragma unroll
    for (int g = 0; g < group; ++g) {
      const float other_maximum = __shfl_xor_sync(ac::full_warp, maximum[g], offset);
      const float other_sum = __shfl_xor_sync(ac::full_warp, sum[g], offset);
      const float highest = fmaxf(maximum[g], other_maximum);
      const float own_weight = exp2f(maximum[g] - highest);
      const float other_weight = exp2f(other_maximum - highest);
      maximum[g] = highest;
      sum[g] = sum[g] * own_weight + other_sum * other_weight;
#pragma unroll
      for (int e = 0; e < elements; ++e) {
        const float other = __shfl_xor_sync(ac::full_warp, weighted[g][e], offset);
        weighted[g][e] = weighted[g][e] * own_weight + other * other_weight;
      }
    }
  }
  if (threadIdx.x % ac::warp_size < lanes) {
#pragma unroll
    for (int g = 0; g < group; ++g) {
      if (lane == 0) warp_states[warp][g] = make_float2(maximum[g], sum[g]);
#pragma unroll
      for (int j = 0; j < vectors; ++j) {
        if (!in_head(lane + j * lanes)) continue;
#pragma unroll
        for (int e = 0; e < Vector::size; ++e) {
          warp_outputs[warp][g * head_dim + (lane + j * lanes) * Vector::size + e] = weighted[g][j * Vector::size + e];
        }
      }
    }
  }
  __syncthreads();

  const long long part_outputs = static_cast<long long>(kv_heads) * gridDim.x * group * head_dim;
  const long long part = static_cast<long long>(kv_head) * gridDim.x;
  float* outputs = workspace + part * group * head_dim;
  float2* states = reinterpret_cast<float2*>(workspace + part_outputs) + part * group;
  T* out_heads = out + static_cast<long long>(kv_head) * group * head_dim;
  auto finish = [&](int i, float total, ac::SoftmaxState merged) {
    if constexpr (Plan::has_sinks) {
      const float sink = ac::to_float(sinks[kv_head * group + i / head_dim]) * log2_e;
      out_heads[i] = ac::from_float<T>(ac::softmax_divide_with_sink(total, merged, sink));
    } else {
      out_heads[i] = ac::from_float<T>(ac::softmax_divide(total, merged));
    }
  };
  for (int i = threadIdx.x; i < group * head_dim; i += Plan::threads) {
    ac::SoftmaxState merged;
    const float total = ac::merge_partials<warps>(
        warps, [&](int w) { return warp_states[w][i / head_dim]; }, [&](int w) { return warp_outputs[w][i]; }, merged);
    if (active_splits == 1) {
      finish(i, total, merged);
    } else {
      outputs[split * group * head_dim + i] = total;
      if (i % head_dim == 0) states[split * group + i / head_dim] = make_float2(merged.maximum, merged.sum);
    }
  }
  if (active_splits == 1 || !ac::arrive_last(&counters[kv_head], active_splits, &last)) return;
  for (int i = threadIdx.x; i < group * head_dim; i += Plan::threads) {
    ac::SoftmaxState merged;
    const float total = ac::merge_partials<8>(
        active_splits, [&](int s) { return ac::load_relaxed(&states[s * group + i / head_dim]); },
        [&](int s) { return ac::load_relaxed(&outputs[s * group * head_dim + i]); }, merged);
    finish(i, total, merged);
  }
}
