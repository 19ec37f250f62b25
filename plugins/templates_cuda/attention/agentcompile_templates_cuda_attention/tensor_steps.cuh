// Decode attention by tensor cores (mma.m16n8k16), 16 positions and up to eight query heads at a time; fp16 and bf16.
//
// A warp owns the positions. With row = lane / 4 and column = lane % 4:
//   scores   A = query heads (row), B = positions: lane (row, column) holds every fourth 16-byte vector of position row and
//            row + 8. The products sum over the head in whatever order q and K agree on, so no data is moved.
//            Results: head row, positions 2 column, 2 column + 1, and those + 8.
//   outputs  A = elements of the head, B = heads: the scores' results are already B's layout; lane (row, column) holds every
//            eighth vector of those four positions of V and pairs positions with byte permutes.
//            Results: heads 2 column and 2 column + 1, the elements of the vectors it holds.
// The weights 2^(score - maximum) are split into Plan::terms values of T, so that their rounding does not add to the output's.
#pragma once
#include "new_heads.cuh"

namespace {

using KeyHead = ac::Head<T, head_dim, 4>;
using ValueHead = ac::Head<T, value_dim, 8>;
constexpr int step = 16;  // positions of one tensor-core step
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

// The caches of a KV head, as a lane reads them into registers. `base`: the first position of this warp's first step.
struct Rows {
  const T* keys;
  const T* values;
  int row;
  int column;

  // Rows that are not cached become zero. `Settled`: see ac::load_settled16.
  template <bool Settled> __device__ __forceinline__ void load_keys(Keys& loaded, int base, const ac::Span& span) const {
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int index = base + u * warps * step + half * 8 + row;
        load<KeyHead, Settled>(loaded[u][half], keys + index * key_row, column, span.is_cached(index));
      }
    }
  }
  template <bool Settled> __device__ __forceinline__ void load_values(Values& loaded, int base, const ac::Span& span) const {
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int index = base + u * warps * step + position_in_step(i, column);
        load<ValueHead, Settled>(loaded[u][i], values + index * value_row, row, span.is_cached(index));
      }
    }
  }
  template <class Head, bool Settled>
  static __device__ __forceinline__ void load(typename Head::Packed& packed, const T* head, int lane, bool wanted) {
    if constexpr (Settled) {
      Head::load_settled(packed, head, lane, wanted);
    } else {
      Head::load(packed, head, lane, wanted);
    }
  }

  // The new position comes from shared memory, where these steps have it.
  __device__ __forceinline__ void take_new(Keys& loaded_keys, Values& loaded_values, int base, const ac::Span& span, int capacity,
                                           const Vector (&new_key)[KeyHead::head_vectors],
                                           const Vector (&new_value)[ValueHead::head_vectors]) const {
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const int offset = span.position - (base + u * warps * step);
      if (offset < 0 || offset >= step || span.position >= capacity) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < KeyHead::vectors; ++j) {
          if (offset != half * 8 + row || !KeyHead::inside(column + 4 * j)) continue;
          loaded_keys[u][half][j] = new_key[column + 4 * j];
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < ValueHead::vectors; ++j) {
          if (offset != position_in_step(i, column) || !ValueHead::inside(row + 8 * j)) continue;
          loaded_values[u][i][j] = new_value[row + 8 * j];
        }
      }
    }
  }
};

// scores[u][i] = q . k of head `row` and the lane's four positions of step u.
__device__ __forceinline__ void multiply(const KeyHead::Packed& query, const Keys& keys, Scores& scores) {
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float products[2][4] = {};  // in turns: half as many wait for each other
#pragma unroll
      for (int j = 0; j < KeyHead::vectors; ++j) {
#pragma unroll
        for (int w = 0; w < 4; w += 2) {
          const unsigned int a[4] = {word(query[j], w), 0u, word(query[j], w + 1), 0u};
          const unsigned int b[2] = {word(keys[u][half][j], w), word(keys[u][half][j], w + 1)};
          ac::mma_m16n8k16<T>(products[w / 2], a, b);
        }
      }
      scores[u][2 * half] = products[0][0] + products[1][0];
      scores[u][2 * half + 1] = products[0][1] + products[1][1];
    }
  }
}

// What becomes of a product q . k on its way to a score in units of log2, for head `row` of a block.
struct Scaling {
  float scale;
  float softcap;
  float slope;
  bool capped;

  __device__ __forceinline__ Scaling(float given_scale, float given_softcap, int head, bool has_head)
      : softcap(given_softcap), slope(0.0f), capped(Plan::has_softcap && given_softcap > 0.0f) {
    scale = capped ? given_scale / softcap : given_scale * log2_e;
    if constexpr (Plan::has_alibi) slope = has_head ? Alibi::slope(head) : 0.0f;
  }

  // `base`: the first position of the lane's first step.
  __device__ __forceinline__ void apply(Scores& scores, int base, int position, int column) const {
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[u][i] *= scale;
        if (capped) scores[u][i] = softcap * log2_e * tanhf(scores[u][i]);
        if constexpr (Plan::has_alibi) {
          scores[u][i] += slope * static_cast<float>(base + u * warps * step + position_in_step(i, column) - position);
        }
      }
    }
  }
};

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
    const float rescale = ac::quick_exp2(maximum - highest);
    maximum = highest;
    sum *= rescale;
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool attended = base + u * warps * step + position_in_step(i, column) < length;
        scores[u][i] = attended ? ac::quick_exp2(scores[u][i] - highest) : 0.0f;
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

  // `outputs`: group * value_dim of them.
  __device__ __forceinline__ void store(float* outputs, float2 (&states)[group], int row, int column) {
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
