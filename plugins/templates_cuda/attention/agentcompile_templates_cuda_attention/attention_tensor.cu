// Decode attention of one layer in one launch, tensor cores (mma.m16n8k16): q/k RMS norm, RoPE, append of the new position,
// split-KV softmax with GQA packing, merge. The same operands, layouts and grid as attention.cu; fp16 and bf16, up to eight
// query heads per block: a KV head's, or one part of them (decode_attention.cuh).
//
// A warp owns 16 positions at a time. With row = lane / 4 and column = lane % 4:
//   scores   A = query heads (row), B = positions: lane (row, column) loads every fourth 16-byte vector of position row and
//            row + 8. The products sum over the head in whatever order q and K agree on, so no data is moved.
//            Results: head row, positions 2 column, 2 column + 1, and those + 8.
//   outputs  A = elements of the head, B = heads: the scores' results are already B's layout; lane (row, column) loads every
//            eighth vector of those four positions of V and pairs positions with byte permutes.
//            Results: heads 2 column and 2 column + 1, the elements of the vectors it loaded.
// So K and V go from memory to registers to tensor cores, without shared memory or shuffles. The weights 2^(score - maximum)
// are split into Plan::terms values of T, so that their rounding does not add to the output's.
// Wins from about 500 positions on and for groups of three and more query heads, where fp32 FMA costs more than the loads.
#include <agentcompile/head.cuh>
#include <agentcompile/split.cuh>
#include "new_heads.cuh"

namespace {

using KeyHead = ac::Head<T, head_dim, 4>;
using ValueHead = ac::Head<T, value_dim, 8>;
constexpr int step = 16;                       // positions of one tensor-core step
constexpr int tile = warps * step * unroll;    // positions per block and round
static_assert(group <= 8, "the query heads of a block are the eight columns of a fragment");

using Keys = KeyHead::Packed[unroll][2];      // positions row, row + 8
using Values = ValueHead::Packed[unroll][4];  // positions 2 column, 2 column + 1, 2 column + 8, 2 column + 9
using Scores = float[unroll][4];              // of the same four positions

__device__ __forceinline__ int position_in_step(int i, int column) { return i / 2 * 8 + 2 * column + i % 2; }

__device__ __forceinline__ unsigned int word(const Vector& vector, int index) {
  return index == 0 ? vector.bits.x : index == 1 ? vector.bits.y : index == 2 ? vector.bits.z : vector.bits.w;
}
__device__ __forceinline__ unsigned int low_halves(unsigned int a, unsigned int b) { return (a & 0xffffu) | (b << 16); }
__device__ __forceinline__ unsigned int high_halves(unsigned int a, unsigned int b) { return (a >> 16) | (b & 0xffff0000u); }

// scores[u][i] = q . k of head `row` and the lane's four positions of step u.
__device__ __forceinline__ void multiply(const KeyHead::Packed& query, const Keys& keys, Scores& scores) {
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < KeyHead::vectors; ++j) {
#pragma unroll
        for (int w = 0; w < 4; w += 2) {
          const unsigned int a[4] = {word(query[j], w), 0u, word(query[j], w + 1), 0u};
          const unsigned int b[2] = {word(keys[u][half][j], w), word(keys[u][half][j], w + 1)};
          ac::mma_m16n8k16<T>(product, a, b);
        }
      }
      scores[u][2 * half] = product[0];
      scores[u][2 * half + 1] = product[1];
    }
  }
}

// Softmax of one warp; scores in units of log2. maximum and sum are of head `row`, sum over this lane's positions only.
struct Running {
  float maximum;
  float sum;
  float weighted[ValueHead::vectors][4][4];  // [vector][word]: (element 2w, head 2c), (2w, 2c+1), (2w+1, 2c), (2w+1, 2c+1)

  __device__ __forceinline__ void clear() {
    maximum = ac::softmax_floor;
    sum = 0.0f;
#pragma unroll
    for (int j = 0; j < ValueHead::vectors; ++j) {
#pragma unroll
      for (int w = 0; w < 4; ++w) weighted[j][w][0] = weighted[j][w][1] = weighted[j][w][2] = weighted[j][w][3] = 0.0f;
    }
  }

  // Turns scores into weights relative to the new maximum; positions from `length` on do not count.
  __device__ __forceinline__ void weigh(Scores& scores, int base, int length, int column) {
    float highest = maximum;
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool attended = base + u * warps * step + position_in_step(i, column) < length;
        highest = attended ? fmaxf(highest, scores[u][i]) : highest;
      }
    }
    highest = ac::warp_max<4>(highest);
    const float rescale = exp2f(maximum - highest);
    maximum = highest;
    sum *= rescale;
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool attended = base + u * warps * step + position_in_step(i, column) < length;
        scores[u][i] = attended ? exp2f(scores[u][i] - highest) : 0.0f;
        sum += scores[u][i];
      }
    }
    const float even = __shfl_sync(ac::full_warp, rescale, 8 * column);  // the lanes of heads 2 column and 2 column + 1
    const float odd = __shfl_sync(ac::full_warp, rescale, 8 * column + 4);
#pragma unroll
    for (int j = 0; j < ValueHead::vectors; ++j) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        weighted[j][w][0] *= even;
        weighted[j][w][1] *= odd;
        weighted[j][w][2] *= even;
        weighted[j][w][3] *= odd;
      }
    }
  }

  __device__ __forceinline__ void add(Scores& weights, const Values& values) {
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      unsigned int b[Plan::terms][2];
#pragma unroll
      for (int term = 0; term < Plan::terms; ++term) {
        b[term][0] = ac::Pair<T>::pack(weights[u][0], weights[u][1]);
        b[term][1] = ac::Pair<T>::pack(weights[u][2], weights[u][3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[u][i] -= ac::round_to<T>(weights[u][i]);
      }
#pragma unroll
      for (int j = 0; j < ValueHead::vectors; ++j) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const unsigned int first = word(values[u][0][j], w), second = word(values[u][1][j], w);
          const unsigned int third = word(values[u][2][j], w), fourth = word(values[u][3][j], w);
          const unsigned int a[4] = {low_halves(first, second), high_halves(first, second), low_halves(third, fourth),
                                     high_halves(third, fourth)};
#pragma unroll
          for (int term = 0; term < Plan::terms; ++term) ac::mma_m16n8k16<T>(weighted[j][w], a, b[term]);
        }
      }
    }
  }

  __device__ __forceinline__ void store(float (&outputs)[group * value_dim], float2 (&states)[group], int row, int column) {
    sum = ac::warp_sum<4>(sum);
    if (column == 0 && row < group) states[row] = make_float2(maximum, sum);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = 2 * column + h;
      if (head >= group) continue;
#pragma unroll
      for (int j = 0; j < ValueHead::vectors; ++j) {
        const int vector = row + 8 * j;
        if (!ValueHead::inside(vector)) continue;
        float* target = &outputs[head * value_dim + vector * Vector::size];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          *reinterpret_cast<float2*>(target + 2 * w) = make_float2(weighted[j][w][h], weighted[j][w][h + 2]);
        }
      }
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
attention_kernel(const Plan::T* q, const Plan::T* k, const Plan::T* v, const Plan::T* q_norm, const Plan::T* k_norm,
                 const Plan::T* cos, const Plan::T* sin, Plan::T* k_cache, Plan::T* v_cache, const long long* position,
                 const Plan::Sink* sinks, Plan::T* out, float* workspace, unsigned int* counters, int kv_heads, int capacity,
                 float scale, float norm_eps, int window, float softcap) {
  __shared__ __align__(16) float warp_outputs[warps][group * value_dim];
  __shared__ float2 warp_states[warps][group];
  __shared__ Vector queries[group][KeyHead::head_vectors];
  __shared__ Vector new_key[KeyHead::head_vectors];
  __shared__ Vector new_value[ValueHead::head_vectors];
  __shared__ bool last;
  __shared__ Parts parts;

  const Operands operands{q, k, v, q_norm, k_norm, cos, sin, k_cache, v_cache, position, sinks, out, workspace, counters,
                          kv_heads, capacity, scale, norm_eps, window, softcap};
  if (Plan::pdl) ac::launch_dependents();
  parts.open();
  const int warp = threadIdx.x / ac::warp_size;
  const int row = threadIdx.x % ac::warp_size / 4;
  const int column = threadIdx.x % 4;
  const int split = blockIdx.x;
  const int splits = gridDim.x;
  const int kv_head = blockIdx.y;
  const Share share{kv_head};

  NewHeads heads;
  heads.fetch_weights(q_norm, k_norm);

  const long long key_row = static_cast<long long>(kv_heads) * head_dim;
  const long long value_row = static_cast<long long>(kv_heads) * value_dim;
  T* key_base = k_cache + kv_head * head_dim;
  T* value_base = v_cache + kv_head * value_dim;
  const int attended = Plan::has_window ? window : 0;
  ac::Span span;
  Keys keys;
  Values values;
  auto load_keys = [&](int base, auto load) {
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int index = base + u * warps * step + half * 8 + row;
        load(keys[u][half], key_base + index * key_row, column, span.is_cached(index));
      }
    }
  };
  auto load_values = [&](int base, auto load) {
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int index = base + u * warps * step + position_in_step(i, column);
        load(values[u][i], value_base + index * value_row, row, span.is_cached(index));
      }
    }
  };
  auto load_key = [](KeyHead::Packed& packed, const T* head, int lane, bool wanted) { KeyHead::load(packed, head, lane, wanted); };
  auto load_value = [](ValueHead::Packed& packed, const T* head, int lane, bool wanted) { ValueHead::load(packed, head, lane, wanted); };
  auto start_of = [&](const ac::Span& of) { return of.first + split * tile + warp * step; };  // of this warp

  if constexpr (Plan::early_kv) {
    span = ac::span_of<tile>(ac::load_hint(position), capacity, attended, splits);
    load_keys(start_of(span), KeyHead::load_settled);
    load_values(start_of(span), ValueHead::load_settled);
  }
  parts.opened();
  ac::grid_dependency_wait();

  const long long new_position = ac::load_relaxed(position);
  heads.fetch(q, k, v, cos, sin, share);
  if (!Plan::early_kv || new_position != span.position) {
    span = ac::span_of<tile>(new_position, capacity, attended, splits);
    if (split < span.active) {
      load_keys(start_of(span), load_key);
      load_values(start_of(span), load_value);
    }
  }
  if (split >= span.active) return;
  parts.expect(span.active);
  const int start = start_of(span);
  const int stride = splits * tile;

  heads.finish(queries, new_key, new_value, norm_eps);
  const bool owner = share.appends() && (span.position - span.first) / tile % splits == split && span.position < capacity;
  if (owner && threadIdx.x < KeyHead::head_vectors) {  // append
    new_key[threadIdx.x].store(key_base + span.position * key_row + threadIdx.x * Vector::size);
  }
  if (owner && threadIdx.x < ValueHead::head_vectors) {
    new_value[threadIdx.x].store(value_base + span.position * value_row + threadIdx.x * Vector::size);
  }
  KeyHead::Packed query;
#pragma unroll
  for (int j = 0; j < KeyHead::vectors; ++j) {
    query[j] = Vector::zero();
    if (row < group && KeyHead::inside(column + 4 * j)) query[j] = queries[row][column + 4 * j];
  }

  const bool capped = Plan::has_softcap && softcap > 0.0f;
  const float score_scale = capped ? scale / softcap : scale * log2_e;
  [[maybe_unused]] float slope = 0.0f;  // of head `row`
  if constexpr (Plan::has_alibi) slope = row < group ? Alibi::slope(share.first_head() + row) : 0.0f;
  Running running;
  running.clear();
  for (int base = start; base - warp * step < span.length; base += stride) {
#pragma unroll
    for (int u = 0; u < unroll; ++u) {  // the new position comes from shared memory
      const int offset = span.position - (base + u * warps * step);
      if (offset < 0 || offset >= step || span.position >= capacity) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < KeyHead::vectors; ++j) {
          if (offset != half * 8 + row || !KeyHead::inside(column + 4 * j)) continue;
          keys[u][half][j] = new_key[column + 4 * j];
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < ValueHead::vectors; ++j) {
          if (offset != position_in_step(i, column) || !ValueHead::inside(row + 8 * j)) continue;
          values[u][i][j] = new_value[row + 8 * j];
        }
      }
    }
    Scores scores;
    multiply(query, keys, scores);
    const bool more = base - warp * step + stride < span.length;
    if (more) load_keys(base + stride, load_key);
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[u][i] *= score_scale;
        if (capped) scores[u][i] = softcap * log2_e * tanhf(scores[u][i]);
        if constexpr (Plan::has_alibi) {
          scores[u][i] += slope * static_cast<float>(base + u * warps * step + position_in_step(i, column) - span.position);
        }
      }
    }
    running.weigh(scores, base, span.length, column);
    running.add(scores, values);
    if (more) load_values(base + stride, load_value);
  }
  running.store(warp_outputs[warp], warp_states[warp], row, column);

  merge(operands, share, span.active, Buffers{warp_outputs, warp_states, parts, &last});
}
