// What both gemv kernels share: the operands, a block's rows, the auxiliary operands and the epilogue of finished rows.
//
//   out[i] = Epilogue::apply(acc, aux0[i], aux1[i]),  acc[p] = dot(weight[i + p*n, :], norm(y)),  p < Plan::pair
//   y = x, or, with Plan::has_residual, y = residual + post_norm(x) (weight post_weight [k]); residual_out [k] is y, where others read it
//
// x [k], weight [Plan::pair * n, k] row-major (gate rows, then up rows), norm_weight and norm_bias [k], aux [n], out [n]; norm_out [k] T is
// norm(y), where others read it as well (Plan::has_norm_out). Every block makes y and norm(y) for itself; the first one writes them.
// Types: T of weights and norm, x Plan::X (T or float, rounded to T behind the norm), aux Plan::A0 and A1, out Plan::Out; fp32
// accumulation. Each block owns a contiguous range of rows, as even as whole rows allow.
#pragma once
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>
#include <agentcompile/row.cuh>

#include "plan.cuh"

namespace {

using Element = Plan::T;
constexpr int streams = Plan::rows * Plan::pair;  // weight rows that are summed at the same time: row r's pair p is r * pair + p

// Absent operands are null.
struct Operands {
  const Plan::X* x;
  const Element* weight;
  const Element* norm_weight;
  const Element* norm_bias;
  const Plan::A0* aux0;
  const Plan::A1* aux1;
  Plan::Out* out;
  Element* norm_out;
  const Element* residual;
  const Element* post_weight;
  Element* residual_out;
  float post_eps;
  int n;
  int rows_each;  // n / gridDim.x: a division would stand before a block's first request
  int k;
  float norm_eps;
};

// What is done to x before its norm: nothing, or the sum with a residual. `Threads`: of the block, those that stage the row.
template <class Vector, int Threads> __device__ __forceinline__ auto before_norm(const Operands& operands, int vectors, int thread) {
  if constexpr (Plan::has_residual) {
    ac::SumBefore<Plan::post_norm, Threads, Plan::held_vectors, Element, Vector> before{
        operands.post_weight, operands.residual, blockIdx.x == 0 ? operands.residual_out : nullptr, operands.post_eps};
    before.prefetch(vectors, thread);
    return before;
  } else {
    return ac::NothingBefore{};
  }
}

struct RowRange {
  int begin;
  int count;
  int end;  // begin + count
};

// The rows of this block; the first blocks take one row more where they do not divide evenly.
__device__ __forceinline__ RowRange rows_of_block(int n, int rows_each) {
  const int block = blockIdx.x;
  const int longer = n - rows_each * static_cast<int>(gridDim.x);
  const int begin = block * rows_each + min(block, longer);
  const int count = rows_each + (block < longer ? 1 : 0);
  return RowRange{begin, count, begin + rows_each + (block < longer ? 1 : 0)};
}

// Auxiliary operands as they are stored until they are used: what converts them waits for them.
struct Aux {
  Plan::A0 first;
  Plan::A1 second;
};

// Those of one row; zeros where it is not this lane's.
__device__ __forceinline__ Aux aux_of(const Operands& operands, int output, bool mine) {
  return Aux{Plan::has_aux0 && mine ? operands.aux0[output] : ac::from_float<Plan::A0>(0.0f),
             Plan::has_aux1 && mine ? operands.aux1[output] : ac::from_float<Plan::A1>(0.0f)};
}

// Lane r < Plan::rows of a warp finishes row `row + r`, as far as row_end; these are its auxiliary operands.
__device__ __forceinline__ Aux load_aux(const Operands& operands, int row, int row_end, int lane) {
  return aux_of(operands, row + lane, lane < Plan::rows && row + lane < row_end);
}

// What is written of a row, from its sum and that of its pair row.
__device__ __forceinline__ Plan::Out finished(const float (&sums)[Plan::pair], const Aux& given) {
  const float aux[2] = {ac::to_float(given.first), ac::to_float(given.second)};
  return ac::from_float<Plan::Out>(Epilogue::apply(sums, aux));
}

// What lane r < Plan::rows of a warp writes to row r of the warp, from sums that every lane has.
__device__ __forceinline__ Plan::Out result_of(const float (&sums)[streams], const Aux& aux, int lane) {
  float mine[Plan::pair];
#pragma unroll
  for (int number = 0; number < streams; ++number) {
    if (number / Plan::pair == lane) mine[number % Plan::pair] = sums[number];
  }
  return finished(mine, aux);
}

// Thread `thread` of `Threads`, behind the barrier that published the `vectors` of `staged`.
template <class Vector, int Threads, class Laid = ac::Straight>
__device__ __forceinline__ void write_normed(const Operands& operands, const Element* staged, int vectors, int thread) {
  if constexpr (Plan::has_norm_out) {
    if (blockIdx.x != 0) return;
    for (int index = thread; index < vectors; index += Threads) {
      Laid::laid(Vector::load(staged + index * Vector::size)).store(operands.norm_out + index * Vector::size);
    }
  }
}

__device__ __forceinline__ void sum_lanes(float (&sums)[streams]) {
#pragma unroll
  for (int number = 0; number < streams; ++number) sums[number] = ac::warp_sum(sums[number]);
}

}  // namespace
