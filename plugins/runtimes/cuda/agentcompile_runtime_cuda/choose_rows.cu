// The largest elements of each row, largest first, of equal ones the first one first: the experts of a prompt's tokens.
//
// x [rows, columns] of type T, dense, 1 <= chosen <= columns <= 32 * Plan::held; values [rows, chosen] of type T and places [rows, chosen] i64.
// NaN is the largest element, as torch has it.
//
// A warp per row. Elements wait in registers as keys: an unsigned number that is ordered as the floats are, over the inverted column. Each
// turn the lanes find their own largest key, then the warp's, and its owner forgets it. No key is 0, so that 0 is what is gone or absent.
// Wins over the framework's selection, which sorts in several passes of whole blocks, where rows are a few hundred elements.
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>

#include "plan.cuh"

namespace {

using T = Plan::T;
constexpr int held = Plan::held;  // elements of a lane
constexpr int lanes = 32;
constexpr unsigned everyone = 0xffffffffu;

struct Key {
  unsigned order, column;  // the column inverted, so that the first of equal ones is larger

  __device__ __forceinline__ bool operator<(const Key& other) const {
    return order < other.order || (order == other.order && column < other.column);
  }
};

__device__ __forceinline__ unsigned order_of(float x) {
  if (x != x) return 0xffffffffu;
  const unsigned bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
choose_rows(const Plan::T* x, Plan::T* values, long long* places, int rows, int columns, int chosen) {
  ac::launch_dependents();
  ac::grid_dependency_wait();
  const int lane = threadIdx.x % lanes;
  const int row = static_cast<int>(blockIdx.x) * (Plan::threads / lanes) + static_cast<int>(threadIdx.x) / lanes;
  if (row >= rows) return;
  const T* const elements = x + static_cast<long long>(row) * columns;
  unsigned orders[held];
#pragma unroll
  for (int i = 0; i < held; ++i) {
    const int column = lane + i * lanes;
    orders[i] = column < columns ? order_of(ac::to_float(elements[column])) : 0;
  }
  for (int turn = 0; turn < chosen; ++turn) {
    Key best{0, 0};
#pragma unroll
    for (int i = 0; i < held; ++i) {
      const Key own{orders[i], ~static_cast<unsigned>(lane + i * lanes)};
      if (best < own) best = own;
    }
#pragma unroll
    for (int apart = lanes / 2; apart > 0; apart /= 2) {
      const Key other{__shfl_xor_sync(everyone, best.order, apart), __shfl_xor_sync(everyone, best.column, apart)};
      if (best < other) best = other;
    }
    const int column = static_cast<int>(~best.column);
#pragma unroll
    for (int i = 0; i < held; ++i) {
      if (lane + i * lanes == column) orders[i] = 0;
    }
    if (lane == turn % lanes) {
      const long long at = static_cast<long long>(row) * chosen + turn;
      values[at] = elements[column];
      places[at] = column;
    }
  }
}
