// Embedding lookup: out[r, :] = table[ids[r], :].
//
// ids [rows]; table [vocabulary, columns]; out [rows, columns], all row-major. Grid (groups of parts, rows): each warp
// moves one part of Plan::part neighbouring elements, 16 bytes per lane and turn where row length and addresses allow.
// Wins where rows are long: few instructions per byte, and as many warps as there are parts.
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include "plan.cuh"  // struct Plan: T, warps, part, pdl

namespace {

template <class Vector>
__device__ __forceinline__ void copy(const Plan::T* source, Plan::T* target, int begin, int end) {
  for (int i = begin + threadIdx.x % 32 * Vector::size; i < end; i += 32 * Vector::size) Vector::load(source + i).store(target + i);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * Plan::warps)
warp_rows_kernel(const long long* ids, const Plan::T* table, Plan::T* out, int columns) {
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();  // the kernel before may still be writing the ids; the table is a weight
  const int begin = (blockIdx.x * Plan::warps + threadIdx.x / 32) * Plan::part;
  const int end = min(begin + Plan::part, columns);
  const Plan::T* source = table + ac::load_relaxed(ids + blockIdx.y) * columns;
  Plan::T* target = out + static_cast<long long>(blockIdx.y) * columns;
  if (columns % ac::Vec16<Plan::T>::size == 0 && ac::is_aligned16(table) && ac::is_aligned16(out)) {
    copy<ac::Vec16<Plan::T>>(source, target, begin, end);
  } else {
    copy<ac::Vec1<Plan::T>>(source, target, begin, end);
  }
}
