// One row at a time times a matrix whose columns lie side by side, every type. What is computed, and the operands: see gemm.cuh; m is 1.
//
// A block makes Plan::columns results of a row. Of each term Plan::lanes neighbouring threads read their part of the matrix's row, 16 bytes each, and
// keep the sums of their own columns; groups of lanes take terms by turns, Plan::unroll of them in flight. Sums meet by shuffles, then
// through shared memory. Blocks of a cluster have the same columns and consecutive shares of the terms: the others store their sums in
// the first one, which adds them in their order. What the first round reads of a weight does not wait for the kernel before.
// Wins for one row: the tiles of the other kernels would multiply rows that are not there, and pass their parts through memory.
#include "gemm.cuh"
#include <agentcompile/reduce.cuh>

namespace {

using Vector = ac::Vec16<Element>;
constexpr int size = Vector::size;
constexpr int columns = Plan::columns;
constexpr int lanes = columns / size;
constexpr int groups = Plan::threads / lanes;
constexpr int warps = Plan::threads / ac::warp_size;
constexpr int unroll = Plan::unroll;
constexpr int cluster = Plan::cluster;
static_assert(lanes * size == columns && ac::warp_size % lanes == 0, "a warp has whole groups");
static_assert(columns <= Plan::threads, "a thread finishes a column");

// The terms of one round, as far as there are any.
struct Round {
  Vector weights[unroll];

  __device__ __forceinline__ void load(const Element* matrix, long long step, long long term, long long end, bool exists) {
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const long long at = term + u * groups;
      weights[u] = exists && at < end ? Vector{ac::load_stream16(matrix + at * step)} : Vector::zero();
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
gemm_kernel(const Plan::Element* a, const Plan::Element* b, const Plan::Aux0* aux0, const Plan::Aux1* aux1, const Plan::Aux2* aux2,
            Plan::T* out, float* parts, int inner, int m, int n, long long k, long long terms, long long count, long long a_offset,
            long long a_outer, long long a_inner, long long a_row, long long a_column, long long b_offset, long long b_outer,
            long long b_inner, long long b_row, long long b_column, long long period0, long long period1, long long period2) {
  __shared__ float of_warps[warps][columns];
  __shared__ float of_blocks[cluster][columns];
  if (Plan::pdl) ac::launch_dependents();
  const int rank = cluster > 1 ? static_cast<int>(ac::cluster_rank()) : 0;
  if constexpr (cluster > 1) ac::cluster_arrive_relaxed();
  Tile tile = Tile::at(blockIdx.x / cluster, m, n, k, 1, columns, terms);
  const long long end = min(k, (rank + 1) * terms);
  const int lane = threadIdx.x % lanes;
  const int column = tile.column + lane * size;
  const bool exists = column < n;
  const Element* const row = factor_of(a + a_offset, Steps{a_outer, a_inner, a_row, a_column}, tile.product, inner) + tile.row * a_row;
  const Element* const matrix = factor_of(b + b_offset, Steps{b_outer, b_inner, b_column, b_row}, tile.product, inner) + column;
  long long term = rank * terms + threadIdx.x / lanes;
  Round round;
  if constexpr (Plan::b_early) round.load(matrix, b_row, term, end, exists);
  ac::grid_dependency_wait();
  if constexpr (!Plan::b_early) round.load(matrix, b_row, term, end, exists);

  float sums[size] = {};
  while (term < end) {
    const Round here = round;
    const long long next = term + groups * unroll;
    round.load(matrix, b_row, next, end, exists);
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const long long at = term + u * groups;
      const float given = at < end ? ac::to_float(row[at * a_column]) : 0.0f;
      float weights[size];
      here.weights[u].unpack(weights);
#pragma unroll
      for (int e = 0; e < size; ++e) sums[e] = at < end ? fmaf(given, weights[e], sums[e]) : sums[e];
    }
    term = next;
  }
#pragma unroll
  for (int e = 0; e < size; ++e) {
#pragma unroll
    for (int offset = ac::warp_size / 2; offset >= lanes; offset /= 2) sums[e] += __shfl_xor_sync(ac::full_warp, sums[e], offset);
    if (threadIdx.x % ac::warp_size < lanes) of_warps[threadIdx.x / ac::warp_size][lane * size + e] = sums[e];
  }
  __syncthreads();

  const int mine = threadIdx.x;
  float sum = 0.0f;
  if (mine < columns) {
#pragma unroll
    for (int warp = 0; warp < warps; ++warp) sum += of_warps[warp][mine];
  }
  if constexpr (cluster > 1) {
    ac::cluster_wait();
    if (mine < columns) ac::store_to_cluster(&of_blocks[rank][mine], 0, sum);
    ac::cluster_arrive_release();
    ac::cluster_wait();
    if (rank > 0) return;
    sum = 0.0f;
    if (mine < columns) {
#pragma unroll
      for (int block = 0; block < cluster; ++block) sum += of_blocks[block][mine];
    }
  }
  if (mine < columns) {
    const float one[1] = {sum};
    results_of(Aux{aux0, aux1, aux2, period0, period1, period2}, out, parts, tile, count, m, n).put(one, tile.row, tile.column + mine);
  }
}
