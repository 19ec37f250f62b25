// RMS or layer norm of long rows, a block per row, which reads it again for each pass, in the framework's roundings (row.cuh).
//
// x, out [rows, columns] contiguous; weight, bias [columns] of a type of their own (Plan::W), or where Plan::channels one element for
// `span` neighbours of a row and other ones for each of `groups` rows. Nothing of a row is held, so it may have any length; what a pass
// reads again lies in L1 or L2 mostly. Rows that are vectors throughout have a body of their own, without a branch at every load.
// Wins where rows are longer than blocks can hold, and of rows of 16 KiB and more, of which there are many, where blocks that hold little
// and are at different passes keep the memory busier than those that hold whole rows.
#include "plan.cuh"
#include "norm_row.cuh"

namespace {

constexpr int warps = Plan::threads / ac::warp_size;
constexpr int stride = Plan::threads * step;

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
norm_looped_kernel(const Plan::T* x, const Plan::W* weight, const Plan::W* bias, Plan::T* out, int columns, float eps, int groups,
                   int span) {
  __shared__ float scratch[warps];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  if constexpr (Plan::columns > 0) columns = Plan::columns;
  const T* const own = x + static_cast<long long>(blockIdx.x) * columns;
  T* const made = out + static_cast<long long>(blockIdx.x) * columns;
  const int channel = first_channel(blockIdx.x, groups, columns, span);
  const int thread = static_cast<int>(threadIdx.x);

  const auto run = [&](auto whole) {
    const auto each = [&](auto visit) {
#pragma unroll 4
      for (int first = thread * step; first < columns; first += stride) {
        Step values;
        Held<T>::load(own, first, columns, whole).unpack(values);
#pragma unroll
        for (int e = 0; e < step; ++e) {
          if (first + (whole ? 0 : e) < columns) visit(values[e]);
        }
      }
    };
    const ac::RowStatistics statistics =
        ac::row_statistics<Plan::norm, warps>(each, columns, eps, scratch, thread / ac::warp_size, thread % ac::warp_size);
#pragma unroll 4
    for (int first = thread * step; first < columns; first += stride) {
      Step values;
      Weights weights;
      const Held<T> again = Held<T>::load(own, first, columns, whole);
      weights.load(weight, bias, first, columns, whole, channel, span);
      again.unpack(values);
      weights.template normalize<false>(values, statistics);
      store_step(values, made, first, columns, whole);
    }
  };
  if (columns % step == 0 && all_aligned(x, out, weight, bias)) {
    run(Known<true>{});
  } else {
    run(Known<false>{});
  }
}
