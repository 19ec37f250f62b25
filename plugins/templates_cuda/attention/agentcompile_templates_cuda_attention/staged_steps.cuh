// Decode attention by tensor cores (mma.m16n8k16) over K and V in shared memory, `together` steps of 16 positions at a time and up to
// eight query heads; fp16 and bf16. A warp owns the positions. With row = lane / 4 and column = lane % 4:
//   scores   A = positions, B = query heads: both as they lie, by ldmatrix.
//            Results: positions row and row + 8, heads 2 column and 2 column + 1.
//   outputs  A = elements of the head, sixteen of V's at a time, turned by ldmatrix; B = heads, of which the weights' terms are positions:
//            the scores' results, turned by movmatrix. Results: elements row and row + 8, heads 2 column and 2 column + 1.
// So nothing is put together from halves of registers, a lane has the factors of its own heads, and the scores of 128 channels are eight
// instructions of the tensor cores. Columns of heads that a block does not have compute with another one's q and are never stored.
// The weights 2^(score - maximum) are split into Plan::terms values of T, so that their rounding does not add to the output's.
#pragma once
#include "new_heads.cuh"

namespace {

constexpr int step = 16;                     // positions of one tensor-core step
constexpr int together = Plan::together;     // steps that a warp takes at once: what one waits for the others fill
constexpr int key_vectors = head_dim / Vector::size;
constexpr int value_vectors = value_dim / Vector::size;
constexpr int key_terms = (key_vectors + 1) / 2;      // of sixteen elements of a head
constexpr int value_tiles = (value_vectors + 1) / 2;  // the same of V
constexpr int stage_vectors = step * (key_vectors + value_vectors);
static_assert(group <= 8, "the query heads of a block are the eight columns of a fragment");

using Query = unsigned int[2 * ((key_vectors + 3) / 4)][2];  // whole fragments: a term or two more than there are
using Scores = float[together][4];                           // of positions row (0, 1) and row + 8 (2, 3); of both heads

// Where a vector of a row of `Vectors` lies. Rows begin in 8 / run different places of eight vectors' banks; vectors are exchanged within
// runs, so that the same one of eight neighbouring rows is in eight places: what ldmatrix reads at once.
template <int Vectors> constexpr int run_of() { return Vectors % 8 == 0 ? 8 : Vectors % 4 == 0 ? 4 : Vectors % 2 == 0 ? 2 : 1; }
template <int Vectors> __device__ __forceinline__ int exchange(int position) {
  return position * run_of<Vectors>() / 8 % run_of<Vectors>();
}
template <int Vectors> __device__ __forceinline__ int place(int position, int vector) {
  return position * Vectors + (vector ^ exchange<Vectors>(position));
}
// In a stage: K [16, D], then V [16, Dv].
__device__ __forceinline__ int key_place(int position, int vector) { return place<key_vectors>(position, vector); }
__device__ __forceinline__ int value_place(int position, int vector) {
  return step * key_vectors + place<value_vectors>(position, vector);
}

// The vector that lies where bit by bit `flipped` is another one of its run. Runs are aligned, so that an address needs no more than that.
__device__ __forceinline__ Vector* turned(Vector* at, int flipped) {
  return reinterpret_cast<Vector*>(reinterpret_cast<unsigned long long>(at) ^ flipped * sizeof(Vector));
}
// A lane has one row of each matrix of a fragment, and of two neighbouring vectors the one with number `half`, at `first`: where that of the
// term or tile `number` lies. Behind the end of a row is its last vector.
template <int Vectors> __device__ __forceinline__ Vector* further(Vector* first, int number, int half) {
  constexpr int run = run_of<Vectors>();
  Vector* found = turned(first, 2 * number % run) + 2 * number / run * run;
  return 2 * number + 1 == Vectors ? found - half : found;
}

// The block's query heads as B. Elements behind the head are zero, here and in K.
__device__ __forceinline__ void read_query(const Vector (&queries)[group][key_vectors], int lane, Query& query) {
  const Vector* head = queries[min(lane % 8, group - 1)];
#pragma unroll
  for (int first = 0; first < key_vectors; first += 4) {
    unsigned int fragment[4];
    ac::ldmatrix_x4(fragment, head + min(first + lane / 8, key_vectors - 1));
#pragma unroll
    for (int i = 0; i < 4; ++i) query[(first + i) / 2][i % 2] = first + i < key_vectors ? fragment[i] : 0u;
  }
}

// A lane's rows and vectors of a stage, as it gives their addresses to ldmatrix.
struct Fragments {
  int key_half;    // of two neighbouring vectors, where a row has two
  int value_half;  // the same
  Vector* keys;    // of the first stage
  Vector* values;

  __device__ __forceinline__ Fragments(Vector* stage, int lane)
      : key_half(key_vectors > 1 ? lane / step : 0),
        value_half(value_vectors > 1 ? lane / 8 % 2 : 0),
        keys(stage + key_place(lane % step, key_half)),
        values(stage + value_place(lane % 8 + lane / 16 * 8, value_half)) {}
};

// q . k of a step whose K lies `behind` vectors behind the first stage.
__device__ __forceinline__ void multiply(const Query& query, const Fragments& lane, int behind, float (&scores)[4]) {
  constexpr int chains = key_terms < 4 ? key_terms : 4;  // sums that do not wait for each other
  float products[chains][4] = {};
#pragma unroll
  for (int term = 0; term < key_terms; ++term) {
    unsigned int keys[4];
    ac::ldmatrix_x4(keys, further<key_vectors>(lane.keys + behind, term, lane.key_half));
    if (2 * term + 1 == key_vectors) keys[2] = keys[3] = 0u;
    ac::mma_m16n8k16<T>(products[term % chains], keys, query[term]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    scores[i] = products[0][i];
#pragma unroll
    for (int chain = 1; chain < chains; ++chain) scores[i] += products[chain][i];
  }
}

// What becomes of a product q . k on its way to a score in units of log2, for the two heads of a lane.
struct Scaling {
  float scale;
  float softcap;
  float slopes[2];
  bool capped;

  __device__ __forceinline__ Scaling(float given_scale, float given_softcap, const Share& share, int column)
      : softcap(given_softcap), slopes{}, capped(Plan::has_softcap && given_softcap > 0.0f) {
    scale = capped ? given_scale / softcap : given_scale * log2_e;
    if constexpr (Plan::has_alibi) {
#pragma unroll
      for (int h = 0; h < 2; ++h) slopes[h] = Alibi::slope(share.first_head() + min(2 * column + h, group - 1));
    }
  }

  // `first`: the position of the lane's first row, relative to the token's.
  __device__ __forceinline__ void apply(float (&scores)[4], int first) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[i] *= scale;
      if (capped) scores[i] = softcap * log2_e * tanhf(scores[i]);
      if constexpr (Plan::has_alibi) scores[i] += slopes[i % 2] * static_cast<float>(first + i / 2 * 8);
    }
  }
};

// Over the lanes of a column: all positions of a step.
__device__ __forceinline__ float column_max(float value) {
#pragma unroll
  for (int offset = 4; offset < ac::warp_size; offset *= 2) value = fmaxf(value, __shfl_xor_sync(ac::full_warp, value, offset));
  return value;
}
__device__ __forceinline__ float column_sum(float value) {
#pragma unroll
  for (int offset = 4; offset < ac::warp_size; offset *= 2) value += __shfl_xor_sync(ac::full_warp, value, offset);
  return value;
}

// A warp's outputs in shared memory lie as its lanes have them: by pairs of heads, then by an element's number among eight, then by tiles:
// [pairs][8][tiles][2 (of eight)][2 (heads)]. Rows are longer where they would begin in the same banks.
constexpr int output_pairs = (group + 1) / 2;
constexpr int output_row = 4 * (value_tiles + (value_tiles + 1) % 2);
constexpr int output_vectors = output_pairs * 8 * output_row * 4 / static_cast<int>(sizeof(Vector));
__device__ __forceinline__ unsigned output_place(unsigned head, unsigned element) {
  return (head / 2 * 8 + element % 8) * output_row + element / 16 * 4 + element / 8 % 2 * 2 + head % 2;
}

// Softmax of one warp; scores in units of log2. Of the heads 2 column and 2 column + 1; sums over this lane's positions only.
struct Running {
  float maxima[2];
  float sums[2];
  float weighted[value_tiles][4];  // (element row, both heads), (element row + 8, both heads)

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      maxima[h] = ac::softmax_floor;
      sums[h] = 0.0f;
    }
#pragma unroll
    for (int tile = 0; tile < value_tiles; ++tile) weighted[tile][0] = weighted[tile][1] = weighted[tile][2] = weighted[tile][3] = 0.0f;
  }

  // Turns scores into weights relative to the new maxima; positions from `length` on do not count. `position(u, i)`: that of a score.
  template <class Position> __device__ __forceinline__ void weigh(Scores& scores, int length, bool first, Position position) {
    float highest[2] = {maxima[0], maxima[1]};
#pragma unroll
    for (int u = 0; u < together; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) highest[i % 2] = position(u, i) < length ? fmaxf(highest[i % 2], scores[u][i]) : highest[i % 2];
    }
    float rescale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      highest[h] = column_max(highest[h]);
      rescale[h] = ac::quick_exp2(maxima[h] - highest[h]);
      maxima[h] = highest[h];
      sums[h] *= rescale[h];
    }
#pragma unroll
    for (int u = 0; u < together; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[u][i] = position(u, i) < length ? ac::quick_exp2(scores[u][i] - highest[i % 2]) : 0.0f;
        sums[i % 2] += scores[u][i];
      }
    }
    if (first) return;  // there is nothing yet
#pragma unroll
    for (int tile = 0; tile < value_tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weighted[tile][i] *= rescale[i % 2];
    }
  }

  // Adds a step whose V lies `behind` vectors behind the first stage.
  __device__ __forceinline__ void add(float (&weights)[4], const Fragments& lane, int behind) {
    unsigned int b[Plan::terms][2];
#pragma unroll
    for (int term = 0; term < Plan::terms; ++term) {
      b[term][0] = ac::movmatrix_transposed(ac::Pair<T>::pack(weights[0], weights[1]));
      b[term][1] = ac::movmatrix_transposed(ac::Pair<T>::pack(weights[2], weights[3]));
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[i] -= ac::round_to<T>(weights[i]);
    }
#pragma unroll
    for (int tile = 0; tile < value_tiles; ++tile) {
      unsigned int values[4];
      ac::ldmatrix_x4_transposed(values, further<value_vectors>(lane.values + behind, tile, lane.value_half));
#pragma unroll
      for (int term = 0; term < Plan::terms; ++term) ac::mma_m16n8k16<T>(weighted[tile], values, b[term]);
    }
  }

  __device__ __forceinline__ void store(float* outputs, float2 (&states)[group], int row, int column) {
    const float sum[2] = {column_sum(sums[0]), column_sum(sums[1])};
    if (column >= output_pairs) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row == 0 && 2 * column + h < group) states[2 * column + h] = make_float2(maxima[h], sum[h]);
    }
    float4* target = reinterpret_cast<float4*>(outputs + (column * 8 + row) * output_row);
#pragma unroll
    for (int tile = 0; tile < value_tiles; ++tile) {
      target[tile] = make_float4(weighted[tile][0], weighted[tile][1], weighted[tile][2], weighted[tile][3]);
    }
  }
};

}  // namespace
