// Product of matrices by warpgroups (wgmma), fp16 and bf16, sm_90a. What is computed, and the operands: see gemm.cuh.
//
// A block makes Plan::rows x Plan::columns results, each of its warpgroups but the last Plan::warp_rows x Plan::columns of them. Slices of
// Plan::depth = 64 terms of both factors lie in shared memory as they do in global memory (terms side by side, or lines side by side),
// swizzled as the tensor cores read them (wgmma.cuh), in a ring of Plan::stages. One thread of the last warpgroup has the copy engine
// fill the ring (tensor maps are made from address, extents and steps before the launch; what lies behind the end of an axis arrives
// as zeros). `full` says that a slice has arrived, `free` that every warp has waited for its product; a warpgroup waits for the
// product of the slice before the last one only, so that the tensor cores always have one slice to do. Blocks take tile after tile where
// there are fewer of them than tiles; slices of the next one arrive while the results of this one leave.
// Blocks of a cluster make tiles below each other: each fetches its share of the columns of b for all of them.
// Wins for large products: mma.sync reaches about half of what a Hopper's tensor cores do.
#include "gemm.cuh"
#include <agentcompile/wgmma.cuh>

namespace {

constexpr int depth = Plan::depth;
constexpr int stages = Plan::stages;
constexpr int cluster = Plan::cluster;
constexpr int steps = depth / 16;  // products of one slice
constexpr int bands = Plan::warp_rows / 64;  // of a warpgroup
constexpr int groups = Plan::rows / Plan::warp_rows;  // warpgroups that multiply
static_assert(depth == wg::span && Plan::warp_rows % 64 == 0, "a slice is one span deep, a warpgroup has whole bands");
static_assert(Plan::threads == (groups + 1) * 128, "warpgroups lie below each other, and one copies");
static_assert(stages >= 2, "one slice is multiplied while another one arrives");
static_assert(Plan::a_size > 1 && Plan::b_size > 1, "factors are read by vectors");

// Which of the factor's panels and spans a slice has; a block fetches `Lines` of the lines, in tiles of `box` spans.
template <int Lines, int Along> struct Slices {
  static constexpr bool by_terms = Along == along_terms;
  static constexpr int elements = Lines * depth;
  static constexpr int box = by_terms ? Lines : wg::panel_spans;
  static constexpr int boxes = by_terms ? 1 : Lines / wg::span;
  static_assert(Lines % wg::span == 0 && box <= 256, "tiles that the copy engine fetches");

  template <int Cluster>
  static __device__ __forceinline__ void fetch(Element* slice, const wg::Tiles& tiles, int line, int term, int inner, int outer,
                                               ac::Mbarrier* full) {
    constexpr unsigned short all = (1 << Cluster) - 1;
#pragma unroll
    for (int i = 0; i < boxes; ++i) {
      Element* const panel = slice + i * wg::panel_spans * wg::span;
      const int along = by_terms ? term : line + i * wg::span;
      wg::fetch<Cluster>(panel, tiles, along, by_terms ? line : term, inner, outer, full, all);
    }
  }
};

using SlicesA = Slices<Plan::rows, Plan::a_along>;
using SlicesB = Slices<Plan::columns / cluster, Plan::b_along>;  // what this block fetches
constexpr int stage_elements = SlicesA::elements + SlicesB::elements * cluster;

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads, 1)
gemm_kernel(const __grid_constant__ wg::Tiles a, const __grid_constant__ wg::Tiles b, const Plan::Aux0* aux0, const Plan::Aux1* aux1,
            const Plan::Aux2* aux2, Plan::T* out, float* parts, int inner, int m, int n, long long k, long long terms, long long count,
            long long tiles, int a_outer, int a_inner, int b_outer, int b_inner, long long period0, long long period1,
            long long period2) {
  WG_DYNAMIC_SHARED(shared_bytes);
  Element* const ring = reinterpret_cast<Element*>(shared_bytes);
  ac::Mbarrier* const full = reinterpret_cast<ac::Mbarrier*>(ring + stages * stage_elements);
  ac::Mbarrier* const free = full + stages;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const unsigned rank = cluster > 1 ? ac::cluster_rank() : 0;
  if (Plan::pdl) ac::launch_dependents();
  if (threadIdx.x == 0) {
    wg::prefetch(a);
    wg::prefetch(b);
    for (int stage = 0; stage < stages; ++stage) {
      ac::mbarrier_init(full + stage, 1);
      ac::mbarrier_init(free + stage, groups * 4 * cluster);
    }
    ac::mbarrier_init_fence();
  }
  __syncthreads();
  if constexpr (cluster > 1) {
    ac::cluster_arrive_release();
    ac::cluster_wait();
  }
  ac::grid_dependency_wait();
  const long long first = blockIdx.x / cluster;
  const long long hop = gridDim.x / cluster;
  wg::Turn<stages> turn;

  if (group == groups) {
    if constexpr (Plan::copier_registers > 0) wg::shrink_registers<Plan::copier_registers>();
    if (threadIdx.x == groups * 128) {
      for (long long number = first; number < tiles; number += hop) {
        const Tile tile = Tile::at(number, m, n, k, Plan::rows * cluster, Plan::columns, terms);
        const int outer_place = static_cast<int>(tile.product / inner);
        const int inner_place = static_cast<int>(tile.product % inner);
        const int row = tile.row + static_cast<int>(rank) * Plan::rows;
        const int column = tile.column + static_cast<int>(rank) * (Plan::columns / cluster);
        const int end = static_cast<int>(tile.end_term);
        for (int term = static_cast<int>(tile.first_term); term < end; term += depth) {
          ac::mbarrier_wait(free + turn.stage, turn.parity ^ 1);
          ac::mbarrier_arrive_expect_bytes(full + turn.stage, stage_elements * sizeof(Element));
          Element* const slice = ring + turn.stage * stage_elements;
          SlicesA::fetch<1>(slice, a, row, term, inner_place * a_inner, outer_place * a_outer, full + turn.stage);
          SlicesB::fetch<cluster>(slice + SlicesA::elements + rank * SlicesB::elements, b, column, term, inner_place * b_inner,
                                           outer_place * b_outer, full + turn.stage);
          turn.next();
        }
      }
    }
    __syncwarp();
  } else {
    if constexpr (Plan::copier_registers > 0) wg::grow_registers<Plan::registers>();
    const int lane = threadIdx.x % 32;
    const int warp_row = group * Plan::warp_rows;
    const auto release = [&](int stage) {
      if constexpr (cluster > 1) {
        if (lane < cluster) wg::arrive_in_cluster(free + stage, lane);
      } else {
        if (lane == 0) ac::mbarrier_arrive(free + stage);
      }
    };
    for (long long number = first; number < tiles; number += hop) {
      Tile tile = Tile::at(number, m, n, k, Plan::rows * cluster, Plan::columns, terms);
      tile.row += static_cast<int>(rank) * Plan::rows;
      float sums[bands][Plan::columns / 2] = {};
      const int slices = static_cast<int>((tile.end_term - tile.first_term + depth - 1) / depth);
      int before = turn.stage;
      for (int done = 0; done < slices; ++done) {
        ac::mbarrier_wait(full + turn.stage, turn.parity);
        const Element* const slice = ring + turn.stage * stage_elements;
        const unsigned long long left = wg::descriptor(slice + warp_row * wg::span);  // 64 lines are as far apart in either order
        const unsigned long long right = wg::descriptor(slice + SlicesA::elements);
        wg::fence();
#pragma unroll
        for (int t = 0; t < steps; ++t) {
#pragma unroll
          for (int band = 0; band < bands; ++band) {
            wg::multiply<Element, Plan::columns, SlicesA::by_terms, SlicesB::by_terms>(
                sums[band], left + band * (64 * 128 / 16) + t * wg::next_terms<SlicesA::by_terms>,
                right + t * wg::next_terms<SlicesB::by_terms>);
          }
        }
        wg::commit();
        wg::wait<1>();
        if (done > 0) release(before);
        before = turn.stage;
        turn.next();
      }
      wg::wait<0>();
      release(before);

      const Results results = results_of(Aux{aux0, aux1, aux2, period0, period1, period2}, out, parts, tile, count, m, n);
#pragma unroll
      for (int band = 0; band < bands; ++band) {
        wg::settle(sums[band]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = tile.row + warp_row + band * 64 + threadIdx.x / 32 % 4 * 16 + half * 8 + lane / 4;
          if constexpr (Plan::wide_stores) {
#pragma unroll
            for (int j = 0; j < Plan::columns / 8; j += 4) {
              float values[4][2];
#pragma unroll
              for (int i = 0; i < 8; ++i) values[i / 2][i % 2] = sums[band][(j + i / 2) * 4 + half * 2 + i % 2];
              results.put_wide(values, row, tile.column + j * 8, lane);
            }
          } else {
#pragma unroll
            for (int j = 0; j < Plan::columns / 8; ++j) {
              const float values[2] = {sums[band][j * 4 + half * 2], sums[band][j * 4 + half * 2 + 1]};
              results.put(values, row, tile.column + j * 8 + lane % 4 * 2);
            }
          }
        }
      }
    }
  }
  if constexpr (cluster > 1) {  // nobody leaves while others may still write into its memory
    ac::cluster_arrive_release();
    ac::cluster_wait();
  }
}

extern "C" __global__ void __launch_bounds__(256)
gemm_finish_kernel(const float* parts, const Plan::Aux0* aux0, const Plan::Aux1* aux1, const Plan::Aux2* aux2, Plan::T* out,
                   long long count, int n, int splits, long long period0, long long period1, long long period2) {
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  finish(parts, Aux{aux0, aux1, aux2, period0, period1, period2}, out, count, n, splits);
}
