// Product of matrices by warpgroups (wgmma), fp16 and bf16, sm_90a. What is computed, and the operands: see gemm.cuh.
//
// A block makes Plan::rows x Plan::columns results, each of its warpgroups (four warps) Plan::warp_rows x Plan::columns of them. Slices of
// Plan::depth = 64 terms of both factors lie in shared memory as they do in global memory (terms side by side, or lines side by side),
// swizzled as the tensor cores read them (wgmma.cuh), in a ring of Plan::stages that cp.async fills. A warpgroup waits for the product
// of the slice before the last one only, so that the tensor cores have one slice to do while the next one is waited for; the copy that
// follows takes the place of the slice whose product everybody has waited for.
// Wins for large products: mma.sync reaches about half of what a Hopper's tensor cores do.
#include "gemm.cuh"
#include "wgmma.cuh"

namespace {

constexpr int threads = Plan::threads;
constexpr int depth = Plan::depth;
constexpr int stages = Plan::stages;
constexpr int steps = depth / 16;  // products of one slice
constexpr int bands = Plan::warp_rows / 64;  // of a warpgroup
static_assert(depth == wg::span && Plan::warp_rows % 64 == 0, "a slice is one span deep, a warpgroup has whole bands");
static_assert(threads == Plan::rows / Plan::warp_rows * 128, "warpgroups lie below each other");
static_assert(stages >= 3, "one slice is multiplied, one is waited for, one is on its way");

template <int Lines, int Along> struct Slices {
  static constexpr bool by_terms = Along == along_terms;
  static constexpr int elements = Lines * depth;
  static constexpr int hop = threads / 8;  // spans between two chunks of a thread
  static constexpr int loads = elements / 8 / threads;
  static_assert(Lines % wg::span == 0 && elements / 8 % threads == 0, "every thread copies as many chunks");

  const Element* next;  // the factor from this tile's first line and the next slice's first term on
  long long line_step;
  long long term_step;
  int lines;  // that exist from there on

  // The next slice, of which `left` terms exist; a vector exists as a whole or not at all.
  __device__ __forceinline__ void copy(Element* slice, int left) {
    const int first = threadIdx.x / 8;
    const int chunk = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < loads; ++i) {
      const int number = first + i * hop;
      const int line = by_terms ? number : number / wg::panel_spans * wg::span + chunk * 8;
      const int term = by_terms ? chunk * 8 : number % wg::panel_spans;
      ac::cp_async16_zero_fill(slice + wg::place(number, chunk), next + line * line_step + term * term_step, line < lines && term < left);
    }
    next += depth * term_step;
  }
};

using SlicesA = Slices<Plan::rows, Plan::a_along>;
using SlicesB = Slices<Plan::columns, Plan::b_along>;
constexpr int stage_elements = SlicesA::elements + SlicesB::elements;
static_assert(Plan::a_size > 1 && Plan::b_size > 1, "factors are read by vectors");

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
gemm_kernel(const Plan::Element* a, const Plan::Element* b, const Plan::Aux0* aux0, const Plan::Aux1* aux1, const Plan::Aux2* aux2,
            Plan::T* out, float* parts, int inner, int m, int n, long long k, long long terms, long long count, long long a_offset,
            long long a_outer, long long a_inner, long long a_row, long long a_column, long long b_offset, long long b_outer,
            long long b_inner, long long b_row, long long b_column, long long period0, long long period1, long long period2) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Element* const ring = reinterpret_cast<Element*>(shared_bytes);
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
  const int warp_row = warp / 4 * Plan::warp_rows;
  const int lane = threadIdx.x % 32;

  const auto copy = [&](int stage, long long term) {
    const int left = static_cast<int>(min(tile.end_term - term, static_cast<long long>(depth)));  // none behind the last slice
    from_a.copy(ring + stage * stage_elements, left);
    from_b.copy(ring + stage * stage_elements + SlicesA::elements, left);
    ac::cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < stages - 2; ++stage) copy(stage, tile.first_term + stage * depth);

  float sums[bands][Plan::columns / 2] = {};
  int stage = 0;
  for (long long term = tile.first_term; term < tile.end_term; term += depth) {
    ac::cp_async_wait<stages - 3>();
    wg::fence_async_proxy();
    __syncthreads();  // the slice is here, and everybody has waited for the product of the slice before the last one
    const Element* const slice = ring + stage * stage_elements;
    unsigned long long left = wg::descriptor(slice + warp_row * wg::span);  // 64 lines are as far apart in either order
    unsigned long long right = wg::descriptor(slice + SlicesA::elements);
    wg::fence();
#pragma unroll
    for (int t = 0; t < steps; ++t) {
#pragma unroll
      for (int band = 0; band < bands; ++band) {
        wg::multiply<Element, Plan::columns, SlicesA::by_terms, SlicesB::by_terms>(
            sums[band], left + band * (64 * 128 / 16) + t * wg::next_terms<SlicesA::by_terms>, right + t * wg::next_terms<SlicesB::by_terms>);
      }
    }
    wg::commit();
    const int free = stage < 2 ? stage + stages - 2 : stage - 2;
    copy(free, term + (stages - 2) * depth);
    stage = stage + 1 == stages ? 0 : stage + 1;
    wg::wait<1>();
  }
  wg::wait<0>();

  const Results results = results_of(Aux{aux0, aux1, aux2, period0, period1, period2}, out, parts, tile, count, m, n);
#pragma unroll
  for (int band = 0; band < bands; ++band) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.row + warp_row + band * 64 + warp % 4 * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int j = 0; j < Plan::columns / 8; ++j) {
        const float values[2] = {sums[band][j * 4 + half * 2], sums[band][j * 4 + half * 2 + 1]};
        results.put(values, row, tile.column + j * 8 + lane % 4 * 2);
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
