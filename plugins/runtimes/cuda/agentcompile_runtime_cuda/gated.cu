// Gate and up of a prompt chunk and what becomes of both, in one product by warpgroups (wgmma), fp16 and bf16, sm_90a:
//
//   out[t, i] = activation(sum over j of x[t, j] gate[i, j]) * sum over j of x[t, j] up[i, j]
//
// x [count, terms], gate and up [columns, terms], out [count, columns], dense; fp32 sums, rounded as activation.cuh says. The activation
// is Plan::activation; it is evaluated while no products are made.
//
// Two blocks of a cluster make tiles of 128 rows below each other, of 128 columns of gate and the same ones of up: one fetches the lines of
// gate for both, the other those of up. Slices of 64 terms lie in a ring of Plan::stages (wgmma.cuh); one thread of the last warpgroup
// has the copy engine fill it. `full` says that a slice has arrived, `free` that every warp of both blocks has waited for its products.
// A thread has a column of gate and the same one of up in registers, so that nothing but the result is written. Blocks stay
// and take tile after tile, Plan::band clusters of rows together, so that their lines of x and of the weights stay in the L2 cache.
// Wins for many rows: results of 2 columns and a pass over them are not written and read.
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/quads.cuh>
#include <agentcompile/wgmma.cuh>

#include "plan.cuh"

namespace {

using T = Plan::T;
constexpr int cluster = 2;
constexpr int groups = 2;  // warpgroups that multiply
constexpr int rows = groups * 64;
constexpr int columns_of_tile = 128;
constexpr int stages = Plan::stages;
constexpr int depth = wg::span;  // terms of a slice
constexpr int x_elements = rows * depth;
constexpr int weight_elements = columns_of_tile * depth;
constexpr int stage_elements = x_elements + 2 * weight_elements;
constexpr int both = 2 * columns_of_tile;

// The rows and columns that a cluster makes.
struct Tile {
  int row, column;

  static __device__ __forceinline__ Tile at(int number, int count, int columns) {
    const int tiles_down = (count + cluster * rows - 1) / (cluster * rows);
    const int tiles_across = (columns + columns_of_tile - 1) / columns_of_tile;
    const int width = Plan::band * tiles_across;
    const int first = number / width * Plan::band;
    const int height = min(Plan::band, tiles_down - first);
    const int inside = number % width;
    return {(first + inside % height) * cluster * rows, inside / height * columns_of_tile};
  }
};

__device__ __forceinline__ float gated(float gate, float up) { return ac::gated<T>(Plan::activation, gate, up); }

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads, 1)
gated_rows(const __grid_constant__ wg::Tiles x, const __grid_constant__ wg::Tiles gate, const __grid_constant__ wg::Tiles up, T* out,
           int count, int columns, int terms, int tiles) {
  WG_DYNAMIC_SHARED(shared_bytes);
  T* const ring = reinterpret_cast<T*>(shared_bytes);
  ac::Mbarrier* const full = reinterpret_cast<ac::Mbarrier*>(ring + stages * stage_elements);
  ac::Mbarrier* const free = full + stages;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int rank = static_cast<int>(ac::cluster_rank());
  if (threadIdx.x == 0) {
    wg::prefetch(x);
    wg::prefetch(rank == 0 ? gate : up);
    for (int stage = 0; stage < stages; ++stage) {
      ac::mbarrier_init(full + stage, 1);
      ac::mbarrier_init(free + stage, groups * 4 * cluster);
    }
    ac::mbarrier_init_fence();
  }
  __syncthreads();
  ac::cluster_arrive_release();
  ac::cluster_wait();
  const int first = blockIdx.x / cluster, hop = gridDim.x / cluster;
  const int slices = (terms + depth - 1) / depth;
  wg::Turn<stages> turn;

  if (group == groups) {
    wg::shrink_registers<Plan::copier_registers>();
    if (threadIdx.x == groups * 128) {
      constexpr unsigned short all = (1 << cluster) - 1;
      for (int number = first; number < tiles; number += hop) {
        const Tile tile = Tile::at(number, count, columns);
        for (int slice = 0; slice < slices; ++slice) {
          ac::mbarrier_wait(free + turn.stage, turn.parity ^ 1);
          ac::mbarrier_arrive_expect_bytes(full + turn.stage, stage_elements * sizeof(T));
          T* const place = ring + turn.stage * stage_elements;
          wg::fetch<1>(place, x, slice * depth, tile.row + rank * rows, 0, 0, full + turn.stage, all);
          wg::fetch<cluster>(place + x_elements + rank * weight_elements, rank == 0 ? gate : up, slice * depth, tile.column, 0, 0,
                             full + turn.stage, all);
          turn.next();
        }
      }
    }
    __syncwarp();
  } else {
    wg::grow_registers<Plan::registers>();
    const int lane = threadIdx.x % 32;
    const auto release = [&](int stage) {
      if (lane < cluster) wg::arrive_in_cluster(free + stage, lane);
    };
    for (int number = first; number < tiles; number += hop) {
      const Tile tile = Tile::at(number, count, columns);
      float sums[both / 2] = {};
      int before = turn.stage;
      for (int slice = 0; slice < slices; ++slice) {
        ac::mbarrier_wait(full + turn.stage, turn.parity);
        const T* const place = ring + turn.stage * stage_elements;
        const unsigned long long left = wg::descriptor(place + group * 64 * wg::span);
        const unsigned long long right = wg::descriptor(place + x_elements);
        wg::fence();
#pragma unroll
        for (int t = 0; t < depth / 16; ++t) {
          wg::multiply<T, both, true, true>(sums, left + t * wg::next_terms<true>, right + t * wg::next_terms<true>);
        }
        wg::commit();
        wg::wait<1>();
        if (slice > 0) release(before);
        before = turn.stage;
        turn.next();
      }
      wg::wait<0>();
      wg::settle(sums);
      release(before);

#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = tile.row + rank * rows + group * 64 + threadIdx.x / 32 % 4 * 16 + 8 * h + lane / 4;
#pragma unroll
        for (int j = 0; j < columns_of_tile / 8; j += 4) {
          unsigned words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float* const of_gate = sums + 4 * (j + i) + 2 * h;
            const float* const of_up = of_gate + columns_of_tile / 2;
            words[i] = ac::packed<T>(gated(of_gate[0], of_up[0]), gated(of_gate[1], of_up[1]));
          }
          ac::transpose(words);
          const int column = tile.column + 8 * (j + lane % 4);
          if (row < count && column < columns) {
            *reinterpret_cast<uint4*>(out + static_cast<long long>(row) * columns + column) =
                make_uint4(words[0], words[1], words[2], words[3]);
          }
        }
      }
    }
  }
  ac::cluster_arrive_release();  // nobody leaves while others may still write into its memory
  ac::cluster_wait();
}
