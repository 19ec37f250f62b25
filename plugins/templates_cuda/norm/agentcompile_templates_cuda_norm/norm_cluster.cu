// RMS or layer norm of long rows, each held by the blocks of a cluster (sm_90): operands, roundings, residual and Epilogue as norm.cu.
//
// Grid (Plan::splits, rows), a cluster per row. Each block holds one part of the row (norm_part.cuh) and sends what it adds up to into
// the shared memory of the others, so that the row is read once and one launch is enough; all add up the parts in the same order.
// Wins where rows are long and clusters of them fill the device: few rows leave SMs idle, which norm_split.cu does not.
#include "plan.cuh"
#include "norm_part.cuh"

extern "C" __global__ void __launch_bounds__(Plan::threads)
norm_cluster_kernel(const Plan::T* x, const Plan::W* weight, const Plan::W* bias, const Plan::T* residual, const Plan::T* aux0,
                    const Plan::T* aux1, Plan::T* out, Plan::T* residual_out, float eps, int groups, int span) {
  constexpr int splits = Plan::splits;
  __shared__ float scratch[warps];
  __shared__ float squares[splits], means[splits];
  if (Plan::pdl) ac::launch_dependents();
  ac::cluster_arrive_relaxed();
  const long long offset = static_cast<long long>(blockIdx.y) * columns;
  const bool whole = columns % step == 0 && all_aligned(x, weight, bias, residual, aux0, aux1, out, residual_out);
  const int end = end_of(blockIdx.x);
  const int channel = first_channel(blockIdx.y, groups, columns, span);
  Weights weights[vectors];
  auto load_weights = [&] {
#pragma unroll
    for (int i = 0; i < vectors; ++i) weights[i].load(weight, bias, first_of(i), end, whole, channel, span);
  };
  if constexpr (Plan::early_weights) load_weights();
  ac::grid_dependency_wait();
  Part part;
  part.load(x + offset, residual + offset, end, whole);
  part.load_others(aux0 + offset, aux1 + offset, end, whole);
  Step values[vectors];
  part.unpack(values, residual_out + offset, end, whole);
  const Figures own = figures_of(values, end, scratch);
  ac::cluster_wait();  // the others have started
  if (threadIdx.x < splits) {
    ac::store_to_cluster(&squares[blockIdx.x], threadIdx.x, own.squares);
    if constexpr (layer) ac::store_to_cluster(&means[blockIdx.x], threadIdx.x, own.mean);
  }
  ac::cluster_arrive_release();
  ac::cluster_wait();
  if constexpr (!Plan::early_weights) load_weights();
  Figures figures[splits];
#pragma unroll
  for (int i = 0; i < splits; ++i) figures[i] = Figures{squares[i], layer ? means[i] : 0.0f};
  const ac::RowStatistics statistics = statistics_of(figures, [](int i) { return i; }, [](float all) { return all; }, eps);
  part.write(values, weights, statistics, out + offset, end, whole);
}
