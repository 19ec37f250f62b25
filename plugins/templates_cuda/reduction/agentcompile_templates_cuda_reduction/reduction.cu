// Reduction of rows, the last axes: out[r] over c of x[r, c], or the first place of an extreme, or both.
//
// x [rows, columns] is the plan's expression over in0, in1, in2; out, indices [rows]. A row, or one of `splits` parts of it,
// belongs to Plan::warps_per_row warps: one (several rows per block) or all of the block's. Threads take 16 bytes at a time,
// Plan::unroll of them before the first is used. Where rows are split, the parts' states go to ws_states [splits, rows, words],
// and a second launch merges them, a warp per row.
// One warp per row wins where rows are short and many, a block where they are long, parts where rows are fewer than SMs.
#include "plan.cuh"
#include "finish.cuh"

namespace {

constexpr int warps = Plan::threads / ac::warp_size;
constexpr int warps_per_row = Plan::warps_per_row;
constexpr int rows_per_block = warps / warps_per_row;
constexpr int threads_per_row = warps_per_row * ac::warp_size;
static_assert(warps_per_row == 1 || rows_per_block == 1, "a row belongs to one warp or to the whole block");

// The elements begin .. end - 1 of a row that starts at `row`.
__device__ __forceinline__ State scan(const Elements& elements, long long row, int begin, int end, bool vectors) {
  State state = State::nothing();
  constexpr int stride = threads_per_row * step;
  const int thread = threadIdx.x % threads_per_row;
  long long first = begin + thread * step;
  for (; first + (Plan::unroll - 1) * stride < end; first += Plan::unroll * stride) {
    float values[Plan::unroll][step];
#pragma unroll
    for (int i = 0; i < Plan::unroll; ++i) elements.load_below(row + first + i * stride, row + end, 0.0f, vectors, values[i]);
#pragma unroll
    for (int i = 0; i < Plan::unroll; ++i) {
      state.add(values[i], static_cast<int>(first) + i * stride, static_cast<int>(end - first) - i * stride);
    }
  }
  for (; first < end; first += stride) {
    float values[step];
    elements.load_below(row + first, row + end, 0.0f, vectors, values);
    state.add(values, static_cast<int>(first), static_cast<int>(end - first));
  }
  return state;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
reduction_kernel(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, Plan::T* out, long long* indices, float* ws_states,
                 long long rows, int columns, int part, float scale, long long period0, long long period1, long long period2) {
  __shared__ State states[warps];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const int warp = threadIdx.x / ac::warp_size;
  const int lane = threadIdx.x % ac::warp_size;
  const long long row = static_cast<long long>(blockIdx.x) * rows_per_block + (warps_per_row == 1 ? warp : 0);
  if (row >= rows) return;
  const Elements elements = elements_of(in0, in1, in2, period0, period1, period2);
  const int begin = blockIdx.y * part;
  const int end = min(static_cast<long long>(begin) + part, static_cast<long long>(columns));
  State state = reduction::merge_warp(scan(elements, row * columns, begin, end, columns % step == 0 && elements.in_vectors<step>()));
  if constexpr (warps_per_row > 1) {
    if (lane == 0) states[warp] = state;
    __syncthreads();
    if (warp > 0) return;
    state = reduction::merge_warp(lane < warps ? states[lane] : State::nothing());
  }
  if (lane > 0) return;
  if constexpr (Plan::split) {
    keep(state, ws_states, blockIdx.y * rows + row);
  } else {
    write(state, scale, out, indices, row);
  }
}

extern "C" __global__ void __launch_bounds__(128)
reduction_finish_kernel(const float* ws_states, Plan::T* out, long long* indices, long long results, int splits, float scale) {
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  finish(ws_states, out, indices, results, splits, scale);
}
