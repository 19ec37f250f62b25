// Product of fp32 matrices on tensor cores, sm_80 and later. What is computed, and the operands: see gemm.cuh.
//
// A float is exactly the sum of three bf16 numbers: its first eight bits, the next eight, the last eight. Of the nine products of
// two such sums the six largest are added up, by mma.m16n8k16 (bf16); the other three are together below 2^-23 of the product, less
// than fp32 rounds. Tensor cores truncate where they add, which would carry sums of many terms towards zero: the sums of a slice of
// Plan::depth terms begin anew, and are then added to the others in fp32, rounded to nearest.
//
// A block makes Plan::rows x Plan::columns results, each of its warps Plan::warp_rows x Plan::warp_columns of them. Slices lie in
// shared memory in three planes of bf16 (layout: fragments.cuh), two slices in turn: while one is multiplied the next one is on its
// way into registers, from where it is split into the other's place. Pieces of an infinity are NaN: sums that are NaN are added up once
// more as fp32, term by term.
// Wins where both sides have a few hundred lines and terms: six products of 16-bit tensor cores take less time than one of FMA pipes.
#include "fragments.cuh"

namespace {

constexpr int threads = Plan::threads;
constexpr int depth = Plan::depth;
constexpr int step = 16;  // terms of one mma
constexpr int steps = depth / step;
constexpr int planes = 3;
constexpr int warps_n = Plan::columns / Plan::warp_columns;
constexpr int row_fragments = Plan::warp_rows / 16;
constexpr int column_fragments = Plan::warp_columns / 8;
static_assert(threads == Plan::rows / Plan::warp_rows * warps_n * 32, "the tile is what its warps hold");
static_assert(Plan::warp_columns % 16 == 0, "fragments of b come in pairs");
static_assert(sizeof(Element) == 4, "fp32");

using Piece = unsigned short;  // the bits of a bf16 number

// The first eight bits of a number, as a float; an infinity stays one, a NaN one.
__device__ __forceinline__ float first_bits(float x) {
  return x != x ? __int_as_float(0x7fff0000) : __uint_as_float(__float_as_uint(x) & 0xffff0000u);
}

// x is pieces[0] + pieces[1] + pieces[2] exactly, unless the last ones are below the smallest bf16 number; NaN where x is not finite.
__device__ __forceinline__ void split_up(float x, float (&pieces)[planes]) {
  pieces[0] = first_bits(x);
  const float rest = x - pieces[0];
  pieces[1] = first_bits(rest);
  pieces[2] = rest - pieces[1];
}

__device__ __forceinline__ Piece bits_of(float piece) { return static_cast<Piece>(__float_as_uint(piece) >> 16); }

template <int Size> struct Loaded {
  using Vector = ac::Vec16<Element>;
  static_assert(Size == Vector::size, "single elements or whole vectors");
};
template <> struct Loaded<1> {
  using Vector = ac::Vec1<Element>;
};

// The slices of one factor: Lines rows of a (or columns of b) of `depth` terms each, Size neighbours at a time.
template <int Lines, int Along, int Size> struct Slices {
  using Own = Layout<Lines, Along>;
  using Vector = typename Loaded<Size>::Vector;
  static constexpr bool by_terms = Own::by_terms;
  static constexpr int elements = Own::elements;  // of a plane
  static constexpr int per_span = Own::width / Size;
  static constexpr int vectors = elements / Size;
  static constexpr int loads = (vectors + threads - 1) / threads;
  static_assert(Own::width % Size == 0 && 8 % Size == 0, "a span is whole vectors, a chunk too");

  const Element* first;
  long long line_step;
  long long term_step;
  int lines;  // that exist from `first` on
  Vector held[loads];

  // Vectors along an axis end with it: the plan uses them only where its extent and every step to them are whole vectors.
  __device__ __forceinline__ void load(long long term, long long end) {
#pragma unroll
    for (int i = 0; i < loads; ++i) {
      const int vector = i * threads + threadIdx.x;
      const int span = vector / per_span;
      const int at = vector % per_span * Size;
      const int line = by_terms ? span : at;
      const long long own = term + (by_terms ? at : span);
      const bool exists = (vectors % threads == 0 || vector < vectors) && line < lines && own < end;
      held[i] = exists ? Vector::load(first + line * line_step + own * term_step) : Vector::zero();
    }
  }

  // Into the planes of a slice, one behind the other, `apart` elements from each other.
  __device__ __forceinline__ void store(Piece* slice, int apart) const {
#pragma unroll
    for (int i = 0; i < loads; ++i) {
      const int vector = i * threads + threadIdx.x;
      if (vectors % threads != 0 && vector >= vectors) continue;
      float values[Size];
      held[i].unpack(values);
      struct alignas(Size * sizeof(Piece)) Several {
        Piece pieces[Size];
      };
      Several several[planes];
#pragma unroll
      for (int e = 0; e < Size; ++e) {
        float pieces[planes];
        split_up(values[e], pieces);
#pragma unroll
        for (int p = 0; p < planes; ++p) several[p].pieces[e] = bits_of(pieces[p]);
      }
      const int at = vector % per_span * Size;
      Piece* const place = slice + Own::place(vector / per_span, at / 8) + at % 8;
#pragma unroll
      for (int p = 0; p < planes; ++p) *reinterpret_cast<Several*>(place + p * apart) = several[p];
    }
  }
};

using SlicesA = Slices<Plan::rows, Plan::a_along, Plan::a_size>;
using SlicesB = Slices<Plan::columns, Plan::b_along, Plan::b_size>;
constexpr int slice_elements = planes * (SlicesA::elements + SlicesB::elements);

// Adds the products of a slice, [16 rows, warp's columns] of them, to `sums`: the smallest pieces first, in sums of their own.
__device__ __forceinline__ void multiply(const Piece* slice, int row, Lane lane, const unsigned (&right)[steps][planes][column_fragments / 2][4],
                                         float (&sums)[column_fragments][4]) {
  float parts[column_fragments][4] = {};
  unsigned left[steps][planes][4];
#pragma unroll
  for (int t = 0; t < steps; ++t) {
#pragma unroll
    for (int p = 0; p < planes; ++p) read_a<SlicesA::Own>(slice + p * SlicesA::elements, row, t * step, lane, left[t][p]);
  }
#pragma unroll
  for (int order = planes - 1; order >= 0; --order) {  // pieces p of a and q of b with p + q = order
#pragma unroll
    for (int p = 0; p <= order; ++p) {
#pragma unroll
      for (int t = 0; t < steps; ++t) {
#pragma unroll
        for (int j = 0; j < column_fragments; ++j) {
          const unsigned(&pair)[4] = right[t][order - p][j / 2];
          const unsigned two[2] = {pair[j % 2 * 2], pair[j % 2 * 2 + 1]};
          ac::mma_m16n8k16_bf16(parts[j], left[t][p], two);
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < column_fragments; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[j][e] += parts[j][e];
  }
}

// One sum as fp32 has it.
__device__ __noinline__ float added_up(const Element* line_a, const Element* line_b, long long step_a, long long step_b, long long terms) {
  float sum = 0.0f;
  for (long long t = 0; t < terms; ++t) sum = fmaf(line_a[t * step_a], line_b[t * step_b], sum);
  return sum;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
gemm_kernel(const Plan::Element* a, const Plan::Element* b, const Plan::Aux0* aux0, const Plan::Aux1* aux1, const Plan::Aux2* aux2,
            Plan::T* out, float* parts, int inner, int m, int n, long long k, long long terms, long long count, long long a_offset,
            long long a_outer, long long a_inner, long long a_row, long long a_column, long long b_offset, long long b_outer,
            long long b_inner, long long b_row, long long b_column, long long period0, long long period1, long long period2) {
  AC_DYNAMIC_SHARED(Piece, slices);
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const Tile tile = Tile::of_block(m, n, k, Plan::rows, Plan::columns, terms);
  const Steps steps_a{a_outer, a_inner, a_row, a_column};
  const Steps steps_b{b_outer, b_inner, b_column, b_row};
  const Element* const tile_a = factor_of(a + a_offset, steps_a, tile.product, inner) + tile.row * a_row;
  const Element* const tile_b = factor_of(b + b_offset, steps_b, tile.product, inner) + tile.column * b_column;
  SlicesA from_a{tile_a, a_row, a_column, m - tile.row, {}};
  SlicesB from_b{tile_b, b_column, b_row, n - tile.column, {}};
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / warps_n * Plan::warp_rows;
  const int warp_column = warp % warps_n * Plan::warp_columns;
  const int lane_number = threadIdx.x % 32;
  const Lane lane{lane_number / 8, lane_number % 8};

  float sums[row_fragments][column_fragments][4] = {};
  from_a.load(tile.first_term, tile.end_term);
  from_b.load(tile.first_term, tile.end_term);
  int half = 0;
  for (long long term = tile.first_term; term < tile.end_term; term += depth) {
    Piece* const slice = slices + half * slice_elements;
    Piece* const slice_b = slice + planes * SlicesA::elements;
    from_a.store(slice, SlicesA::elements);
    from_b.store(slice_b, SlicesB::elements);
    __syncthreads();
    if (term + depth < tile.end_term) {
      from_a.load(term + depth, tile.end_term);
      from_b.load(term + depth, tile.end_term);
    }
    unsigned right[steps][planes][column_fragments / 2][4];
#pragma unroll
    for (int t = 0; t < steps; ++t) {
#pragma unroll
      for (int p = 0; p < planes; ++p) {
#pragma unroll
        for (int j = 0; j < column_fragments / 2; ++j) {
          read_b<SlicesB::Own>(slice_b + p * SlicesB::elements, warp_column + j * 16, t * step, lane, right[t][p][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < row_fragments; ++i) multiply(slice, warp_row + i * 16, lane, right, sums[i]);
    half ^= 1;
  }

  const Results results = results_of(Aux{aux0, aux1, aux2, period0, period1, period2}, out, parts, tile, count, m, n);
#pragma unroll
  for (int i = 0; i < row_fragments; ++i) {
#pragma unroll
    for (int half_of = 0; half_of < 2; ++half_of) {
      const int row = warp_row + i * 16 + half_of * 8 + lane_number / 4;
#pragma unroll
      for (int j = 0; j < column_fragments; ++j) {
        const int column = warp_column + j * 8 + lane_number % 4 * 2;
        float values[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          values[e] = sums[i][j][half_of * 2 + e];
          if (values[e] != values[e] && tile.row + row < m && tile.column + column + e < n) {
            values[e] = added_up(tile_a + row * a_row + tile.first_term * a_column, tile_b + (column + e) * b_column + tile.first_term * b_row,
                                 a_column, b_row, tile.end_term - tile.first_term);
          }
        }
        results.put(values, tile.row + row, tile.column + column);
      }
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
