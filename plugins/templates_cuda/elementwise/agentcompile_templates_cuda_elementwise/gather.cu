// Embedding lookup: out[r, :] = table[ids[r], :].
//
// ids [rows]; table [vocabulary, columns]; out [rows, columns]; grid (parts of a row, rows). 16-byte moves where the row
// length and the addresses allow, single elements elsewhere.
// Wins over the framework only by being part of the captured chain: it moves a few kilobytes.
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include "plan.cuh"

extern "C" __global__ void __launch_bounds__(Plan::threads)
gather_kernel(const long long* ids, const Plan::T* table, Plan::T* out, int rows, int columns) {
  using Vector = ac::Vec16<Plan::T>;
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const int row = blockIdx.y;
  if (row >= rows) return;
  const int thread = blockIdx.x * Plan::threads + threadIdx.x;
  const int threads = gridDim.x * Plan::threads;
  const Plan::T* source = table + ac::load_relaxed(ids + row) * columns;
  Plan::T* target = out + static_cast<long long>(row) * columns;
  if (columns % Vector::size == 0 && ac::is_aligned16(table) && ac::is_aligned16(out)) {
    for (int i = thread * Vector::size; i < columns; i += threads * Vector::size) Vector::load(source + i).store(target + i);
  } else {
    for (int i = thread; i < columns; i += threads) target[i] = source[i];
  }
}
