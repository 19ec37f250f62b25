// RMS or layer norm of rows, in the framework's roundings (row.cuh), optionally of x + residual, and what is computed with it.
//
// x, residual, out, residual_out, aux0, aux1 [rows, columns] contiguous; weight, bias [columns] of a type of their own (Plan::W), or
// where Plan::channels holds one element for `span` neighbours of a row and other ones for each of `groups` rows. A row is held in
// registers by Plan::warps_per_row warps: one (several rows per block, for heads) or all of the block's. Where there is a residual the
// sum is rounded to T, written to residual_out and normalized, as the framework does with separate operators. What is written is
// Epilogue of the rounded norm and of aux0, aux1. With Plan::beside the second half of the grid normalizes other rows: those of K
// beside those of Q, which depend on each other in nothing. Weights are read before the row where blocks are few and wait for the kernel
// before them (Plan::early_weights), else behind the statistics: they would keep registers from further blocks.
// Wins as a kernel of its own only where no matrix-vector product follows that could recompute the norm in its prologue.
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/row.cuh>
#include "plan.cuh"

namespace {

using T = Plan::T;
using Vector = ac::Vec16<T>;
constexpr int warps = Plan::threads / ac::warp_size;
constexpr int warps_per_row = Plan::warps_per_row;
constexpr int rows_per_block = warps / warps_per_row;
constexpr int threads_per_row = warps_per_row * ac::warp_size;
constexpr int vectors = Plan::vectors;  // per thread: threads_per_row * vectors * Vector::size >= columns
static_assert(warps_per_row == 1 || rows_per_block == 1, "a row belongs to one warp or to the whole block");

using Chunk = float[Vector::size];

// Elements first .. first + Vector::size - 1 of a row, zero beyond its end. Weights that are wider or narrower than T are read one by one.
template <class Element>
__device__ __forceinline__ void load_chunk(Chunk& values, const Element* row, int first, int columns, bool whole_vectors) {
  if constexpr (sizeof(Element) == sizeof(T)) {
    if (whole_vectors) {
      auto bits = ac::Vec16<Element>::zero();
      if (first < columns) bits = ac::Vec16<Element>::load(row + first);
      bits.unpack(values);
      return;
    }
  }
#pragma unroll
  for (int e = 0; e < Vector::size; ++e) values[e] = first + e < columns ? ac::to_float(row[first + e]) : 0.0f;
}

// The weights of the same elements where `span` neighbours share one, from that of the row's first channel on.
__device__ __forceinline__ void load_channels(Chunk& values, const Plan::W* weights, int first, int columns, int span) {
#pragma unroll
  for (int e = 0; e < Vector::size; ++e) values[e] = first + e < columns ? ac::to_float(weights[(first + e) / span]) : 0.0f;
}

__device__ __forceinline__ void store_chunk(const Chunk& values, T* row, int first, int columns, bool whole_vectors) {
  if (whole_vectors) {
    if (first < columns) Vector::pack(values).store(row + first);
  } else {
#pragma unroll
    for (int e = 0; e < Vector::size; ++e) {
      if (first + e < columns) row[first + e] = ac::from_float<T>(values[e]);
    }
  }
}

__device__ __forceinline__ bool vector_access(const void* pointer) {
  return (reinterpret_cast<unsigned long long>(pointer) & 15u) == 0;  // null for an absent operand is fine
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
norm_kernel(const Plan::T* x, const Plan::W* weight, const Plan::W* bias, const Plan::T* residual, const Plan::T* aux0,
            const Plan::T* aux1, Plan::T* out, Plan::T* residual_out, const Plan::T* x_beside, const Plan::W* weight_beside,
            Plan::T* out_beside, int rows, int columns, int rows_beside, int columns_beside, float eps, int groups, int span) {
  __shared__ float scratch[warps];
  if (Plan::pdl) ac::launch_dependents();
  if (Plan::beside && blockIdx.y == 1) {
    x = x_beside;
    weight = weight_beside;
    out = out_beside;
    rows = rows_beside;
    columns = columns_beside;
  }
  const int warp = threadIdx.x / ac::warp_size;
  const int lane = threadIdx.x % ac::warp_size;
  const int thread = threadIdx.x % threads_per_row;
  const int row = blockIdx.x * rows_per_block + (warps_per_row == 1 ? warp : 0);
  const bool whole = columns % Vector::size == 0 && vector_access(x) && vector_access(out) && vector_access(weight) &&
                     vector_access(bias) && vector_access(residual) && vector_access(residual_out) &&
                     (!Plan::has_aux0 || vector_access(aux0)) && (!Plan::has_aux1 || vector_access(aux1));
  auto first_of = [&](int i) { return (i * threads_per_row + thread) * Vector::size; };

  constexpr int held = Plan::early_weights ? vectors : 1;
  Chunk scales[held], shifts[held];
  auto load_weights = [&](int i, Chunk& scale, Chunk& shift) {
    if constexpr (Plan::channels) {
      const int channel = row % groups * (columns / span);
      if constexpr (Plan::has_weight) load_channels(scale, weight + channel, first_of(i), columns, span);
      if constexpr (Plan::has_bias) load_channels(shift, bias + channel, first_of(i), columns, span);
    } else {
      if constexpr (Plan::has_weight) load_chunk(scale, weight, first_of(i), columns, whole);
      if constexpr (Plan::has_bias) load_chunk(shift, bias, first_of(i), columns, whole);
    }
  };
  if constexpr (Plan::early_weights) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) load_weights(i, scales[i], shifts[i]);
  }
  ac::grid_dependency_wait();
  if (row >= rows) return;

  const long long offset = static_cast<long long>(row) * columns;
  Chunk values[vectors], with0[vectors], with1[vectors];
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    if constexpr (Plan::has_aux0) load_chunk(with0[i], aux0 + offset, first_of(i), columns, whole);
    if constexpr (Plan::has_aux1) load_chunk(with1[i], aux1 + offset, first_of(i), columns, whole);
    load_chunk(values[i], x + offset, first_of(i), columns, whole);
    if constexpr (Plan::has_residual) {
      Chunk added;
      load_chunk(added, residual + offset, first_of(i), columns, whole);
#pragma unroll
      for (int e = 0; e < Vector::size; ++e) values[i][e] = ac::round_to<T>(values[i][e] + added[e]);
      store_chunk(values[i], residual_out + offset, first_of(i), columns, whole);
    }
  }
  auto each = [&](auto visit) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
#pragma unroll
      for (int e = 0; e < Vector::size; ++e) {
        if (first_of(i) + e < columns) visit(values[i][e]);
      }
    }
  };
  const int warp_of_row = warps_per_row == 1 ? 0 : warp;
  const ac::RowStatistics statistics = ac::row_statistics<Plan::norm, warps_per_row>(each, columns, eps, scratch, warp_of_row, lane);
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    constexpr auto place = [](int vector) { return Plan::early_weights ? vector : 0; };
    if constexpr (!Plan::early_weights) load_weights(i, scales[0], shifts[0]);
#pragma unroll
    for (int e = 0; e < Vector::size; ++e) {
      const float scale = Plan::has_weight ? scales[place(i)][e] : 1.0f;
      const float shift = Plan::has_bias ? shifts[place(i)][e] : 0.0f;
      const float normal[1] = {ac::normalize<Plan::norm, T>(values[i][e], statistics, scale, shift)};
      const float with[2] = {Plan::has_aux0 ? with0[i][e] : 0.0f, Plan::has_aux1 ? with1[i][e] : 0.0f};
      values[i][e] = Epilogue::apply(normal, with);
    }
    store_chunk(values[i], out + offset, first_of(i), columns, whole);
  }
}
