// Product of matrices on tensor cores (mma.m16n8k16), fp16 and bf16, sm_80 and later. What is computed, and the operands: see gemm.cuh.
//
// A block makes Plan::rows x Plan::columns results, each of its warps Plan::warp_rows x Plan::warp_columns of them. Slices of
// Plan::depth terms of both factors lie in shared memory as they do in global memory (terms side by side, or lines side by side), in
// a ring of Plan::stages that cp.async fills while earlier slices are multiplied (see fragments.cuh). Fragments of the
// next 16 terms are read while the last ones are multiplied; Plan::ahead reads the first ones of the next slice at the end of one.
// Copies are issued a part at a time beneath the products of a slice. Factors that allow no whole vectors go through registers, element
// by element, into the same places.
// Wins wherever two matrices of 16-bit elements are larger than a few tiles.
#include "fragments.cuh"

namespace {

constexpr int threads = Plan::threads;
constexpr int depth = Plan::depth;
constexpr int stages = Plan::stages;
constexpr int step = 16;  // terms of one mma
constexpr int steps = depth / step;  // of a slice
constexpr int warps_n = Plan::columns / Plan::warp_columns;
constexpr int row_fragments = Plan::warp_rows / 16;
constexpr int column_fragments = Plan::warp_columns / 8;
// Portions of a copy, one per step: many copies at once keep reads waiting. In one piece where other blocks fill the pauses.
constexpr int portions = Plan::ahead && Plan::a_size > 1 && Plan::b_size > 1 ? steps - 1 : 1;
static_assert(threads == Plan::rows / Plan::warp_rows * warps_n * 32, "the tile is what its warps hold");
static_assert(Plan::warp_columns % 16 == 0 && steps % 2 == 0, "fragments of b come in pairs, steps by turns");

// A factor's slice as it is copied, Size elements at a time.
template <int Lines, int Along, int Size> struct Slices {
  using Own = Layout<Lines, Along>;
  static constexpr bool by_terms = Own::by_terms;
  static constexpr int spans = Own::spans;
  static constexpr int chunks = Own::chunks;
  static constexpr int elements = Own::elements;
  static constexpr int loads = spans * chunks / threads;
  static_assert(spans * chunks % threads == 0, "every thread copies as many chunks");

  static constexpr int hop = threads / chunks;  // spans between two chunks of a thread
  static_assert(threads % chunks == 0, "a thread copies the same chunk of every span that it takes");

  const Element* next;  // the factor from this tile's first line and the next slice's first term on
  long long line_step;
  long long term_step;
  int lines;  // that exist from there on

  // A part of the next slice, of which `left` terms exist; the last part of `count` comes last.
  __device__ __forceinline__ void copy(Element* slice, int left, int part, int count) {
    const int span = threadIdx.x / chunks;
    const int chunk = threadIdx.x % chunks;
    const long long across = by_terms ? line_step : term_step;
    const long long along = by_terms ? term_step : line_step;
    const int first = loads * part / count;
    const int end = loads * (part + 1) / count;
    const Element* from = next + (span + first * hop) * across + chunk * 8 * along;
    const int length = by_terms ? left : lines;  // of a span
    const int height = by_terms ? lines : left;
    if constexpr (Size > 1) {  // a vector exists as a whole or not at all
#pragma unroll
      for (int i = first; i < end; ++i) {
        const bool exists = span + i * hop < height && chunk * 8 < length;
        ac::cp_async16_zero_fill(slice + Own::place(span + i * hop, chunk), from, exists);
        from += hop * across;
      }
    } else {
#pragma unroll 1  // what several chunks hold at a time has no room beside the sums
      for (int i = first; i < end; ++i) {
        alignas(16) Element held[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const bool exists = span + i * hop < height && chunk * 8 + e < length;
          held[e] = exists ? from[e * along] : ac::from_float<Element>(0.0f);
        }
        *reinterpret_cast<uint4*>(slice + Own::place(span + i * hop, chunk)) = *reinterpret_cast<const uint4*>(held);
        from += hop * across;
      }
    }
    if (part + 1 == count) next += depth * term_step;
  }
};

using SlicesA = Slices<Plan::rows, Plan::a_along, Plan::a_size>;
using SlicesB = Slices<Plan::columns, Plan::b_along, Plan::b_size>;
constexpr int stage_elements = SlicesA::elements + SlicesB::elements;

struct Fragments {
  unsigned a[row_fragments][4];
  unsigned b[column_fragments / 2][4];

  __device__ __forceinline__ void read(const Element* slice, int row, int column, int term, Lane lane) {
#pragma unroll
    for (int i = 0; i < row_fragments; ++i) read_a<SlicesA::Own>(slice, row + i * 16, term, lane, a[i]);
#pragma unroll
    for (int j = 0; j < column_fragments / 2; ++j) read_b<SlicesB::Own>(slice + SlicesA::elements, column + j * 16, term, lane, b[j]);
  }

  __device__ __forceinline__ void multiply(float (&sums)[row_fragments][column_fragments][4]) const {
#pragma unroll
    for (int i = 0; i < row_fragments; ++i) {
#pragma unroll
      for (int j = 0; j < column_fragments; ++j) {
        const unsigned right[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
        ac::mma_m16n8k16<Element>(sums[i][j], a[i], right);
      }
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
gemm_kernel(const Plan::Element* a, const Plan::Element* b, const Plan::Aux0* aux0, const Plan::Aux1* aux1, const Plan::Aux2* aux2,
            Plan::T* out, float* parts, int inner, int m, int n, long long k, long long terms, long long count, long long a_offset,
            long long a_outer, long long a_inner, long long a_row, long long a_column, long long b_offset, long long b_outer,
            long long b_inner, long long b_row, long long b_column, long long period0, long long period1, long long period2) {
  AC_DYNAMIC_SHARED(Element, ring);
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const Tile tile = Tile::of_block(m, n, k, Plan::rows, Plan::columns, terms);
  const Steps steps_a{a_outer, a_inner, a_row, a_column};
  const Steps steps_b{b_outer, b_inner, b_column, b_row};
  SlicesA from_a{factor_of(a + a_offset, steps_a, tile.product, inner) + tile.row * a_row + tile.first_term * a_column, a_row, a_column,
                 m - tile.row};
  SlicesB from_b{factor_of(b + b_offset, steps_b, tile.product, inner) + tile.column * b_column + tile.first_term * b_row, b_column, b_row,
                 n - tile.column};
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / warps_n * Plan::warp_rows;
  const int warp_column = warp % warps_n * Plan::warp_columns;
  const int lane_number = threadIdx.x % 32;
  const Lane lane{lane_number / 8, lane_number % 8};

  const auto copy = [&](int stage, long long term, int part, int count) {
    const int left = static_cast<int>(min(tile.end_term - term, static_cast<long long>(depth)));  // none behind the last slice
    from_a.copy(ring + stage * stage_elements, left, part, count);
    from_b.copy(ring + stage * stage_elements + SlicesA::elements, left, part, count);
    if (part + 1 == count) ac::cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < stages - 1; ++stage) copy(stage, tile.first_term + stage * depth, 0, 1);

  // The slice that is multiplied next is here, and everybody has read the last one, whose place the next copy takes.
  const auto turn = [&]() {
    ac::cp_async_wait<stages - 2>();
    __syncthreads();
  };
  float sums[row_fragments][column_fragments][4] = {};
  Fragments fragments[2];
  int stage = 0;
  if constexpr (Plan::ahead) {
    turn();
    fragments[0].read(ring, warp_row, warp_column, 0, lane);
  }
  for (long long term = tile.first_term; term < tile.end_term; term += depth) {
    const Element* const slice = ring + stage * stage_elements;
    const int before = stage == 0 ? stages - 1 : stage - 1;
    stage = stage + 1 == stages ? 0 : stage + 1;
    if constexpr (!Plan::ahead) {
      turn();
      fragments[0].read(slice, warp_row, warp_column, 0, lane);
    }
#pragma unroll
    for (int t = 0; t < steps; ++t) {
      if (t + 1 < steps) {
        fragments[(t + 1) % 2].read(slice, warp_row, warp_column, (t + 1) * step, lane);
      } else if (Plan::ahead && term + depth < tile.end_term) {
        turn();
        fragments[0].read(ring + stage * stage_elements, warp_row, warp_column, 0, lane);
      }
      if (t < portions) copy(before, term + (stages - 1) * depth, t, portions);
      fragments[t % 2].multiply(sums);
    }
  }

  const Results results = results_of(Aux{aux0, aux1, aux2, period0, period1, period2}, out, parts, tile, count, m, n);
#pragma unroll
  for (int i = 0; i < row_fragments; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.row + warp_row + i * 16 + half * 8 + lane_number / 4;
      if constexpr (Plan::wide_stores) {
#pragma unroll
        for (int j = 0; j < column_fragments; j += 4) {
          float values[4][2];
#pragma unroll
          for (int e = 0; e < 8; ++e) values[e / 2][e % 2] = sums[i][j + e / 2][half * 2 + e % 2];
          results.put_wide(values, row, tile.column + warp_column + j * 8, lane_number);
        }
      } else {
#pragma unroll
        for (int j = 0; j < column_fragments; ++j) {
          const float values[2] = {sums[i][j][half * 2], sums[i][j][half * 2 + 1]};
          results.put(values, row, tile.column + warp_column + j * 8 + lane_number % 4 * 2);
        }
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
