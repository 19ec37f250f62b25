// RMS or layer norm of many rows, whose weights stay in registers: operands, roundings and residual as norm.cu, without an Epilogue.
//
// The grid is what is resident at once (Plan::blocks on every SM) and walks over the rows. A row is held by a team of Plan::lanes
// threads: 8, 16 or 32 neighbours of a warp, or the whole block. A team has Plan::batch rows at a time, and those that come next are on
// their way while it works on them. Weights are read once per block instead of once per row, and stay as they are stored: `opaque`
// keeps the compiler from holding them as floats instead, which take twice the registers in half precision.
// Wins where there are several rows for each team that the device holds, wherever a row fits.
#include "plan.cuh"
#include "norm_row.cuh"

namespace {

constexpr int lanes = Plan::lanes;
constexpr int teams = Plan::threads / lanes;
constexpr int batch = Plan::batch;
constexpr int vectors = Plan::vectors;  // per thread and row: lanes * vectors * step >= columns
constexpr int columns = Plan::columns;
static_assert(lanes <= ac::warp_size || (lanes == Plan::threads && batch == 1), "a row belongs to a part of a warp or to the whole block");

__device__ __forceinline__ int first_of(int i) { return i * lanes * step + static_cast<int>(threadIdx.x % lanes) * step; }

// What a team holds of its rows as they are stored.
struct Rows {
  Held<T> own[batch][vectors];
  Held<T> added[batch][vectors];

  // Of a row that does not exist what was there stays: nothing of it is written.
  __device__ __forceinline__ void load(const T* x, const T* residual, int row, int rows, bool whole) {
#pragma unroll
    for (int j = 0; j < batch; ++j) {
      if (row + j * teams >= rows) continue;
      const long long offset = static_cast<long long>(row + j * teams) * columns;
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        own[j][i] = Held<T>::load(x + offset, first_of(i), columns, whole);
        if constexpr (Plan::has_residual) added[j][i] = Held<T>::load(residual + offset, first_of(i), columns, whole);
      }
    }
  }
};

template <class Element> __device__ __forceinline__ void opaque(Held<Element>& held) {
#ifndef CUDA_EMU
#pragma unroll
  for (int w = 0; w < Held<Element>::words; ++w) asm volatile("" : "+r"(held.bits[w]));
#endif
}

__device__ __forceinline__ float team_sum(float value, float* scratch) {
  if constexpr (lanes <= ac::warp_size) return ac::warp_sum<lanes>(value);
  return ac::block_sum<Plan::threads / ac::warp_size>(value, scratch, threadIdx.x / ac::warp_size, threadIdx.x % ac::warp_size);
}

__device__ __forceinline__ ac::RowStatistics statistics_of(const Step (&values)[vectors], float eps, float* scratch, bool whole) {
  auto add_up = [&](auto term) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
#pragma unroll
      for (int e = 0; e < step; ++e) {
        if (first_of(i) + (whole ? 0 : e) < columns) sum += term(values[i][e]);
      }
    }
    return team_sum(sum, scratch) * (1.0f / static_cast<float>(columns));
  };
  const float mean = Plan::norm == ac::norm_layer ? add_up([](float value) { return value; }) : 0.0f;
  const float square = add_up([&](float value) { return (value - mean) * (value - mean); });
  return ac::RowStatistics{mean, rsqrtf(square + eps)};
}

__device__ __forceinline__ void store_row(const Step (&values)[vectors], T* rows, int row, bool whole) {
#pragma unroll
  for (int i = 0; i < vectors; ++i) store_step(values[i], rows + static_cast<long long>(row) * columns, first_of(i), columns, whole);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks)
norm_kept_kernel(const Plan::T* x, const Plan::W* weight, const Plan::W* bias, const Plan::T* residual, Plan::T* out,
                 Plan::T* residual_out, int rows, float eps) {
  __shared__ float scratch[Plan::threads / ac::warp_size];
  if (Plan::pdl) ac::launch_dependents();
  const int team = static_cast<int>(threadIdx.x / lanes);
  const int stride = gridDim.x * teams * batch;
  const auto walk = [&](auto whole) {
    Weights weights[vectors];
#pragma unroll
    for (int i = 0; i < vectors; ++i) weights[i].load(weight, bias, first_of(i), columns, whole, 0, 1);
    ac::grid_dependency_wait();
    Rows next = {};
    next.load(x, residual, blockIdx.x * teams * batch + team, rows, whole);
    for (int first = blockIdx.x * teams * batch; first < rows; first += stride) {  // the same for all threads: they sum up together
      Step values[batch][vectors];
#pragma unroll
      for (int j = 0; j < batch; ++j) {
        const int row = first + j * teams + team;
#pragma unroll
        for (int i = 0; i < vectors; ++i) next.own[j][i].unpack(values[j][i]);
        if constexpr (Plan::has_residual) {
#pragma unroll
          for (int i = 0; i < vectors; ++i) add_rounded(values[j][i], next.added[j][i]);
          if (row < rows) store_row(values[j], residual_out, row, whole);
        }
      }
      next.load(x, residual, first + stride + team, rows, whole);
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        if constexpr (Plan::has_weight) opaque(weights[i].scale);
        if constexpr (Plan::has_bias) opaque(weights[i].shift);
      }
      ac::RowStatistics statistics[batch];
#pragma unroll
      for (int j = 0; j < batch; ++j) statistics[j] = statistics_of(values[j], eps, scratch, whole);
#pragma unroll
      for (int j = 0; j < batch; ++j) {
        const int row = first + j * teams + team;
#pragma unroll
        for (int i = 0; i < vectors; ++i) weights[i].template normalize<false>(values[j][i], statistics[j]);
        if (row < rows) store_row(values[j], out, row, whole);
      }
    }
  };
  if (columns % step == 0 && all_aligned(x, out, weight, bias, residual, residual_out)) {
    walk(Known<true>{});
  } else {
    walk(Known<false>{});
  }
}
