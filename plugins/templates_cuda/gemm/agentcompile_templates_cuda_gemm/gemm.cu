// Product of matrices, tiled, fp32 FMA: every type. What is computed, and the operands: see gemm.cuh.
//
// A block makes Plan::rows x Plan::columns results. Slices of Plan::depth terms of both factors lie in shared memory as fp32, term
// by term, so that a thread reads neighbouring rows and columns at once; while one slice is multiplied the next one is on its way
// into registers, and is stored to the other half of shared memory. A thread holds Plan::thread_rows x Plan::thread_columns sums.
// Wins for fp32, where tensor cores would round, and for shapes that are too ragged for whole vectors.
#include "gemm.cuh"

namespace {

constexpr int threads = Plan::threads;
constexpr int depth = Plan::depth;
constexpr int pad = 4;  // floats, so that lanes that store several terms meet different banks
constexpr int threads_n = Plan::columns / Plan::thread_columns;
constexpr int threads_m = Plan::rows / Plan::thread_rows;
static_assert(threads == threads_m * threads_n, "the tile is what its threads hold");

template <int Size> struct Loaded {
  using Vector = ac::Vec16<Element>;
  static_assert(Size == Vector::size, "single elements or whole vectors");
};
template <> struct Loaded<1> {
  using Vector = ac::Vec1<Element>;
};

// The slices of one factor: Lines rows of a (or columns of b) of `depth` terms each, Size neighbours at a time along Plan's axis.
template <int Lines, int Along, int Size> struct Slices {
  using Vector = typename Loaded<Size>::Vector;
  static constexpr bool by_terms = Along == along_terms;
  static constexpr int per_line = depth / Size;
  static constexpr int per_term = Lines / Size;
  static constexpr int chunks = Lines * depth / Size;
  static constexpr int loads = (chunks + threads - 1) / threads;
  static constexpr int width = Lines + pad;
  static_assert((by_terms ? depth : Lines) % Size == 0, "slices are whole vectors");

  const Element* first;
  long long line_step;
  long long term_step;
  int lines;  // that exist from `first` on
  Vector held[loads];

  static __device__ __forceinline__ int line_of(int chunk) { return by_terms ? chunk / per_line : chunk % per_term * Size; }
  static __device__ __forceinline__ int term_of(int chunk) { return by_terms ? chunk % per_line * Size : chunk / per_term; }

  // Vectors along an axis end with it: the plan uses them only where its extent and every step to them are whole vectors.
  __device__ __forceinline__ void load(long long term, long long end) {
#pragma unroll
    for (int i = 0; i < loads; ++i) {
      const int chunk = i * threads + threadIdx.x;
      const int line = line_of(chunk);
      const long long at = term + term_of(chunk);
      const bool exists = (chunks % threads == 0 || chunk < chunks) && line < lines && at < end;
      held[i] = exists ? Vector::load(first + line * line_step + at * term_step) : Vector::zero();
    }
  }

  __device__ __forceinline__ void store(float (*slice)[width]) const {
#pragma unroll
    for (int i = 0; i < loads; ++i) {
      const int chunk = i * threads + threadIdx.x;
      if (chunks % threads != 0 && chunk >= chunks) continue;
      float values[Vector::size];
      held[i].unpack(values);
#pragma unroll
      for (int e = 0; e < Vector::size; ++e) slice[term_of(chunk) + (by_terms ? e : 0)][line_of(chunk) + (by_terms ? 0 : e)] = values[e];
    }
  }
};

// Which of a tile's lines a thread holds: groups of up to four neighbours, the groups Threads apart, so that a warp reads in order.
template <int PerThread, int Threads> struct Held {
  static constexpr int quad = PerThread < 4 ? PerThread : 4;
  static constexpr int groups = PerThread / quad;

  static __device__ __forceinline__ int first(int group, int thread) { return (group * Threads + thread) * quad; }

  static __device__ __forceinline__ void read(const float* slice, int thread, float (&values)[PerThread]) {
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      if constexpr (quad == 4) {
        const float4 four = *reinterpret_cast<const float4*>(slice + first(group, thread));
        values[group * 4] = four.x;
        values[group * 4 + 1] = four.y;
        values[group * 4 + 2] = four.z;
        values[group * 4 + 3] = four.w;
      } else {
#pragma unroll
        for (int e = 0; e < quad; ++e) values[group * quad + e] = slice[first(group, thread) + e];
      }
    }
  }
};

using Rows = Held<Plan::thread_rows, threads_m>;
using Columns = Held<Plan::thread_columns, threads_n>;
using SlicesA = Slices<Plan::rows, Plan::a_along, Plan::a_size>;
using SlicesB = Slices<Plan::columns, Plan::b_along, Plan::b_size>;

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
gemm_kernel(const Plan::Element* a, const Plan::Element* b, const Plan::Aux0* aux0, const Plan::Aux1* aux1, const Plan::Aux2* aux2,
            Plan::T* out, float* parts, int inner, int m, int n, long long k, long long terms, long long count, long long a_offset,
            long long a_outer, long long a_inner, long long a_row, long long a_column, long long b_offset, long long b_outer,
            long long b_inner, long long b_row, long long b_column, long long period0, long long period1, long long period2) {
  __shared__ __align__(16) float slices_a[2][depth][SlicesA::width];
  __shared__ __align__(16) float slices_b[2][depth][SlicesB::width];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const Tile tile = Tile::of_block(m, n, k, Plan::rows, Plan::columns, terms);
  const Steps steps_a{a_outer, a_inner, a_row, a_column};
  const Steps steps_b{b_outer, b_inner, b_column, b_row};
  SlicesA from_a{factor_of(a + a_offset, steps_a, tile.product, inner) + tile.row * a_row, a_row, a_column, m - tile.row, {}};
  SlicesB from_b{factor_of(b + b_offset, steps_b, tile.product, inner) + tile.column * b_column, b_column, b_row, n - tile.column, {}};
  const int thread_m = threadIdx.x / threads_n;
  const int thread_n = threadIdx.x % threads_n;

  float sums[Plan::thread_rows][Plan::thread_columns] = {};
  from_a.load(tile.first_term, tile.end_term);
  from_b.load(tile.first_term, tile.end_term);
  int half = 0;
  for (long long term = tile.first_term; term < tile.end_term; term += depth) {
    from_a.store(slices_a[half]);
    from_b.store(slices_b[half]);
    __syncthreads();
    if (term + depth < tile.end_term) {
      from_a.load(term + depth, tile.end_term);
      from_b.load(term + depth, tile.end_term);
    }
#pragma unroll
    for (int t = 0; t < depth; ++t) {
      float left[Plan::thread_rows];
      float right[Plan::thread_columns];
      Rows::read(slices_a[half][t], thread_m, left);
      Columns::read(slices_b[half][t], thread_n, right);
#pragma unroll
      for (int i = 0; i < Plan::thread_rows; ++i) {
#pragma unroll
        for (int j = 0; j < Plan::thread_columns; ++j) sums[i][j] = fmaf(left[i], right[j], sums[i][j]);
      }
    }
    half ^= 1;
  }

  const Results results = results_of(Aux{aux0, aux1, aux2, period0, period1, period2}, out, parts, tile, count, m, n);
#pragma unroll
  for (int i = 0; i < Plan::thread_rows; ++i) {
    const int row = tile.row + Rows::first(i / Rows::quad, thread_m) + i % Rows::quad;
#pragma unroll
    for (int group = 0; group < Columns::groups; ++group) {
      float values[Columns::quad];
#pragma unroll
      for (int e = 0; e < Columns::quad; ++e) values[e] = sums[i][group * Columns::quad + e];
      results.put(values, row, tile.column + Columns::first(group, thread_n));
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
gemm_finish_kernel(const float* parts, const Plan::Aux0* aux0, const Plan::Aux1* aux1, const Plan::Aux2* aux2, Plan::T* out,
                   long long count, int n, int splits, long long period0, long long period1, long long period2) {
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  finish(parts, Aux{aux0, aux1, aux2, period0, period1, period2}, out, count, n, splits);
}
