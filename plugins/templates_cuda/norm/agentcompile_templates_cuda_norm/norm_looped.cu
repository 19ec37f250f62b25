// RMS or layer norm of rows that no block can hold in registers, a block per row, in the framework's roundings (row.cuh).
//
// x, out [rows, columns] contiguous; weight, bias [columns] of a type of their own (Plan::W), or where Plan::channels one element for `span` neighbours of a row
// and other ones for each of `groups` rows. The row is read again for each pass, from L2 where it mostly still is.
// Wins where rows are long and few: groups of channels of an image.
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/row.cuh>
#include "plan.cuh"

namespace {

using T = Plan::T;
constexpr int warps = Plan::threads / ac::warp_size;

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
norm_looped_kernel(const Plan::T* x, const Plan::W* weight, const Plan::W* bias, Plan::T* out, int columns, float eps, int groups,
                   int span) {
  __shared__ float scratch[warps];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const T* const own = x + static_cast<long long>(blockIdx.x) * columns;
  T* const made = out + static_cast<long long>(blockIdx.x) * columns;
  auto each = [&](auto visit) {
#pragma unroll 4
    for (int i = threadIdx.x; i < columns; i += Plan::threads) visit(ac::to_float(own[i]));
  };
  const ac::RowStatistics statistics = ac::row_statistics<Plan::norm, warps>(each, columns, eps, scratch, threadIdx.x / ac::warp_size,
                                                                             threadIdx.x % ac::warp_size);
  const int channel = Plan::channels ? static_cast<int>(blockIdx.x) % groups * (columns / span) : 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < columns; i += Plan::threads) {
    const int place = Plan::channels ? channel + i / span : i;
    const float scale = Plan::has_weight ? ac::to_float(weight[place]) : 1.0f;
    const float shift = Plan::has_bias ? ac::to_float(bias[place]) : 0.0f;
    made[i] = ac::from_float<T>(ac::normalize<Plan::norm, T>(ac::to_float(own[i]), statistics, scale, shift));
  }
}
