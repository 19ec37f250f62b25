// RMS or layer norm of rows, in the framework's roundings (row.cuh), optionally of x + residual, and what is computed with it.
//
// x, residual, out, residual_out, aux0, aux1 [rows, columns] contiguous; weight, bias [columns] of a type of their own (Plan::W), or
// where Plan::channels holds one element for `span` neighbours of a row and other ones for each of `groups` rows. A row is held in
// registers by Plan::warps_per_row warps: one (several rows per block, for heads; of many short rows Plan::rows_each at a time, which
// share its weights) or all of the block's. Where there is a residual the sum is rounded to T, written to residual_out and normalized,
// as the framework does with separate operators. What is written is Epilogue of the rounded norm and of aux0, aux1. With Plan::beside
// the second half of the grid normalizes other rows: those of K beside those of Q, which depend on each other in nothing. Weights are
// read before the row where blocks are few and wait for the kernel before them (Plan::early_weights), else behind the statistics: they
// would keep registers from further blocks.
// Rows that are vectors throughout have a body of their own, without a branch at every load.
// Wins as a kernel of its own only where no matrix-vector product follows that could recompute the norm in its prologue.
#include "plan.cuh"
#include "norm_row.cuh"

namespace {

constexpr int warps = Plan::threads / ac::warp_size;
constexpr int warps_per_row = Plan::warps_per_row;
constexpr int rows_each = Plan::rows_each;
constexpr int rows_at_once = warps / warps_per_row;  // of a block, which has rows_each times as many
constexpr int threads_per_row = warps_per_row * ac::warp_size;
constexpr int vectors = Plan::vectors;  // per thread: threads_per_row * vectors * step >= columns
static_assert(warps_per_row == 1 || (rows_at_once == 1 && rows_each == 1), "a row belongs to one warp or to the whole block");
static_assert(rows_each == 1 || !Plan::channels, "rows that share weights");

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
  if constexpr (Plan::columns > 0) columns = Plan::columns;
  const int warp = threadIdx.x / ac::warp_size;
  const int lane = threadIdx.x % ac::warp_size;
  const int thread = threadIdx.x % threads_per_row;  // also of whole blocks: tells the compiler how large it is
  const int first_row = blockIdx.x * rows_at_once * rows_each + (warps_per_row == 1 ? warp : 0);
  const auto row_of = [&](int j) { return first_row + j * rows_at_once; };
  const auto offset_of = [&](int j) { return static_cast<long long>(row_of(j)) * columns; };
  const int channel = first_channel(first_row, groups, columns, span);
  const auto first_of = [&](int i) { return i * threads_per_row * step + thread * step; };

  const auto run = [&](auto whole) {
    Weights weights[Plan::early_weights ? vectors : 1];
    const auto load_weights = [&](int i, Weights& of) { of.load(weight, bias, first_of(i), columns, whole, channel, span); };
    if constexpr (Plan::early_weights) {
#pragma unroll
      for (int i = 0; i < vectors; ++i) load_weights(i, weights[i]);
    }
    ac::grid_dependency_wait();
    if (first_row >= rows) return;

    Held<T> own[rows_each][vectors] = {}, added[rows_each][vectors] = {}, with0[rows_each][vectors] = {}, with1[rows_each][vectors] = {};
#pragma unroll
    for (int j = 0; j < rows_each; ++j) {
      if (j > 0 && row_of(j) >= rows) continue;
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        own[j][i] = Held<T>::load(x + offset_of(j), first_of(i), columns, whole);
        if constexpr (Plan::has_residual) added[j][i] = Held<T>::load(residual + offset_of(j), first_of(i), columns, whole);
        if constexpr (Plan::has_aux0) with0[j][i] = Held<T>::load(aux0 + offset_of(j), first_of(i), columns, whole);
        if constexpr (Plan::has_aux1) with1[j][i] = Held<T>::load(aux1 + offset_of(j), first_of(i), columns, whole);
      }
    }
    Step values[rows_each][vectors];
    ac::RowStatistics statistics[rows_each];
#pragma unroll
    for (int j = 0; j < rows_each; ++j) {
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        own[j][i].unpack(values[j][i]);
        if constexpr (Plan::has_residual) {
          add_rounded(values[j][i], added[j][i]);
          if (j == 0 || row_of(j) < rows) store_step(values[j][i], residual_out + offset_of(j), first_of(i), columns, whole);
        }
      }
      const auto each = [&](auto visit) {
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
#pragma unroll
          for (int e = 0; e < step; ++e) {
            if (first_of(i) + (whole ? 0 : e) < columns) visit(values[j][i][e]);
          }
        }
      };
      const int warp_of_row = warps_per_row == 1 ? 0 : warp;
      statistics[j] = ac::row_statistics<Plan::norm, warps_per_row>(each, columns, eps, scratch, warp_of_row, lane);
    }
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      if constexpr (!Plan::early_weights) load_weights(i, weights[0]);
#pragma unroll
      for (int j = 0; j < rows_each; ++j) {
        if (j > 0 && row_of(j) >= rows) continue;
        Step& made = values[j][i];
        weights[Plan::early_weights ? i : 0].template normalize<Plan::has_epilogue>(made, statistics[j]);
        Step others[2];
        if constexpr (Plan::has_aux0) with0[j][i].unpack(others[0]);
        if constexpr (Plan::has_aux1) with1[j][i].unpack(others[1]);
#pragma unroll
        for (int e = 0; e < step; ++e) {
          const float normal[1] = {made[e]};
          const float with[2] = {Plan::has_aux0 ? others[0][e] : 0.0f, Plan::has_aux1 ? others[1][e] : 0.0f};
          made[e] = Epilogue::apply(normal, with);
        }
        store_step(made, out + offset_of(j), first_of(i), columns, whole);
      }
    }
  };
  const bool whole = columns % step == 0 && all_aligned(x, out, weight, bias, residual, residual_out) &&
                     (!Plan::has_aux0 || ac::is_aligned16(aux0)) && (!Plan::has_aux1 || ac::is_aligned16(aux1));
  if (whole) {
    run(Known<true>{});
  } else {
    run(Known<false>{});
  }
}
