// What the kernels of the family share: which tile a block makes, where results go, and what is done to them on the way.
//
//   out[g, i, j] = Epilogue::apply(acc, aux),  acc = sum over t of a[g, i, t] b[g, t, j],  g = (outer, inner)
//
// a and b are read by steps in elements, of type Element; out [outer, inner, m, n] of type T lies in one piece; fp32 accumulation.
// Element e of out reads element e modulo its size of aux0, aux1, aux2. With several splits each block adds up a part of the
// terms into `parts` [splits][outer, inner, m, n], and a second launch adds these in their order and finishes.
#pragma once
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/quads.cuh>

#include "plan.cuh"

namespace {

using Element = Plan::Element;
using T = Plan::T;
constexpr int aux_full = 0;     // as large as the result
constexpr int aux_row = 1;      // one element per column
constexpr int aux_repeats = 2;  // anything else that repeats
constexpr int aux_scalar = 3;
constexpr int aux_absent = 4;
constexpr int finish_threads = 256;
constexpr int along_terms = 1;  // neighbours in memory: terms of one row of a, or of one column of b
constexpr int along_lines = 2;  // rows of a, or columns of b

// Steps of a factor in elements; a line is a row of a or a column of b.
struct Steps {
  long long outer;
  long long inner;
  long long line;
  long long term;
};

struct Aux {
  const Plan::Aux0* aux0;
  const Plan::Aux1* aux1;
  const Plan::Aux2* aux2;
  long long period0;
  long long period1;
  long long period2;

  template <int Kind, class A> static __device__ __forceinline__ void read(const A* address, long long index, int column, long long period,
                                                                           float& value) {
    if constexpr (Kind == aux_full) value = ac::to_float(address[index]);
    if constexpr (Kind == aux_row) value = ac::to_float(address[column]);
    if constexpr (Kind == aux_repeats) value = ac::to_float(address[index % period]);
    if constexpr (Kind == aux_scalar) value = ac::to_float(*address);
  }

  // What becomes of one sum: element `index` of the result, in this column.
  __device__ __forceinline__ float apply(float sum, long long index, int column) const {
    float values[3] = {};
    read<Plan::aux_kind0>(aux0, index, column, period0, values[0]);
    read<Plan::aux_kind1>(aux1, index, column, period1, values[1]);
    read<Plan::aux_kind2>(aux2, index, column, period2, values[2]);
    return Epilogue::apply(&sum, values);
  }
};

// `Count` neighbours of one row, from element `index` of the result on, in `column` and after it; those from `end` on are none.
// Where the plan says so, they all exist or none does, and their address allows one access.
template <int Count>
__device__ __forceinline__ void store(const float (&values)[Count], T* out, long long index, int column, int end) {
  if constexpr (Plan::whole_stores && Count > 1) {
    static_assert(Count * sizeof(T) == 4 || Count * sizeof(T) == 8 || Count * sizeof(T) == 16, "one access");
    if (column >= end) return;
    struct alignas(Count * sizeof(T)) Several {
      T values[Count];
    };
    Several several;
#pragma unroll
    for (int e = 0; e < Count; ++e) several.values[e] = ac::from_float<T>(values[e]);
    *reinterpret_cast<Several*>(out + index) = several;
  } else {
#pragma unroll
    for (int e = 0; e < Count; ++e) {
      if (column + e < end) out[index + e] = ac::from_float<T>(values[e]);
    }
  }
}

// Where a block's tile lies. Tiles are taken in groups of Plan::group rows of tiles, down the columns of each group, so that
// blocks that run at the same time share rows of a and columns of b in L2.
struct Tile {
  int row;
  int column;
  long long product;  // which one of the batch
  long long first_term;
  long long end_term;

  static __device__ __forceinline__ Tile of_block(int m, int n, long long k, int rows, int columns, long long terms) {
    return at(blockIdx.x, m, n, k, rows, columns, terms);
  }

  template <class Number>
  static __device__ __forceinline__ Tile at(Number number, int m, int n, long long k, int rows, int columns, long long terms) {
    const int tiles_m = (m + rows - 1) / rows;
    const int tiles_n = (n + columns - 1) / columns;
    const long long tiles = static_cast<long long>(tiles_m) * tiles_n;
    Tile tile;
    tile.product = number / tiles;
    const long long place = number % tiles;
    const long long width = static_cast<long long>(Plan::group) * tiles_n;
    const int first = static_cast<int>(place / width) * Plan::group;
    const int height = min(Plan::group, tiles_m - first);
    const int inside = static_cast<int>(place % width);
    tile.row = (first + inside % height) * rows;
    tile.column = inside / height * columns;
    tile.first_term = blockIdx.y * terms;
    tile.end_term = min(k, tile.first_term + terms);
    return tile;
  }
};

// Where the results of a tile go: finished to out, or the sums of a split to its part.
struct Results {
  Aux aux;
  T* out;
  float* parts;
  long long first;  // element of the result, or of parts, where the product begins
  long long product;
  int m;
  int n;

  template <int Count> __device__ __forceinline__ void put(const float (&sums)[Count], int row, int column) const {
    if (row >= m) return;
    const long long inside = static_cast<long long>(row) * n + column;
    if constexpr (Plan::split) {
#pragma unroll
      for (int e = 0; e < Count; ++e) {
        if (column + e < n) parts[first + inside + e] = sums[e];
      }
    } else {
      const long long index = product + inside;
      float values[Count];
#pragma unroll
      for (int e = 0; e < Count; ++e) values[e] = column + e < n ? aux.apply(sums[e], index + e, column + e) : 0.0f;
      store(values, out, index, column, n);
    }
  }

  // 32 columns of a row from `column` on, which four neighbouring lanes hold as the tensor cores leave them: lane i columns 2 i and 2 i + 1
  // of each group of eight, of which every one exists as a whole or not at all. Stores of 16 bytes; all lanes of a warp come here.
  __device__ __forceinline__ void put_wide(const float (&sums)[4][2], int row, int column, int lane) const {
    constexpr bool bare = Plan::aux_kind0 == aux_absent && Plan::aux_kind1 == aux_absent && Plan::aux_kind2 == aux_absent;
    struct alignas(2 * sizeof(T)) Pair {
      T values[2];
    };
    const long long first_of_row = product + static_cast<long long>(row) * n;
    unsigned words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      Pair pair = {};
      if (bare || (row < m && column + j * 8 < n)) {  // there is nothing to read for others
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = column + j * 8 + lane % 4 * 2 + e;
          pair.values[e] = ac::from_float<T>(aux.apply(sums[j][e], first_of_row + at, at));
        }
      }
      words[j] = *reinterpret_cast<const unsigned*>(&pair);
    }
    ac::transpose(words);
    const int at = column + lane % 4 * 8;
    if (row < m && at < n) *reinterpret_cast<uint4*>(out + first_of_row + at) = make_uint4(words[0], words[1], words[2], words[3]);
  }
};

__device__ __forceinline__ Results results_of(const Aux& aux, T* out, float* parts, const Tile& tile, long long count, int m, int n) {
  const long long product = tile.product * m * n;
  return Results{aux, out, parts, blockIdx.y * count + product, product, m, n};
}

__device__ __forceinline__ const Element* factor_of(const Element* factor, const Steps& steps, long long product, int inner) {
  return factor + product / inner * steps.outer + product % inner * steps.inner;
}

// The second launch of several splits: a thread per element of the result.
__device__ __forceinline__ void finish(const float* parts, const Aux& aux, T* out, long long count, int n, int splits) {
  const long long index = static_cast<long long>(blockIdx.x) * finish_threads + threadIdx.x;
  if (index >= count) return;
  float sum = 0.0f;
#pragma unroll 4
  for (int split = 0; split < splits; ++split) sum += ac::load_relaxed(parts + split * count + index);
  out[index] = ac::from_float<T>(aux.apply(sum, index, static_cast<int>(index % n)));
}

}  // namespace
