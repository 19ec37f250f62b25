// Cross entropy of rows: log sum exp(x[r]) - x[r, classes[r]] of every row whose class is not `ignored`, their mean, or their sum.
//
// x [rows, columns] is the plan's expression over in0, in1, in2; classes [rows]; out [rows], or one element. A row is read once, by
// Plan::warps_per_row warps: one (several rows per block) or all of the block's. Of a mean or a sum the rows' losses go to ws_losses
// [rows], and one block of a second launch adds them up in a fixed order and counts the rows. A class that is none makes
// a NaN, and so does a row with an infinity.
// Wins over a log-softmax and a lookup always: nothing as large as the scores is written.
#include "plan.cuh"
#include "reduction.cuh"

namespace {

constexpr int warps = Plan::threads / ac::warp_size;
constexpr int warps_per_row = Plan::warps_per_row;
constexpr int rows_per_block = warps / warps_per_row;
constexpr int threads_per_row = warps_per_row * ac::warp_size;
constexpr int adding = 1024;  // threads of the second launch

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
cross_entropy_kernel(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, const long long* classes, Plan::T* out, float* ws_losses,
                     long long rows, int columns, int ignored, long long period0, long long period1, long long period2) {
  __shared__ State states[warps];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const int warp = threadIdx.x / ac::warp_size;
  const int lane = threadIdx.x % ac::warp_size;
  const long long row = static_cast<long long>(blockIdx.x) * rows_per_block + (warps_per_row == 1 ? warp : 0);
  if (row >= rows) return;
  const Elements elements = elements_of(in0, in1, in2, period0, period1, period2);
  const bool vectors = columns % step == 0 && elements.in_vectors<step>();
  const long long start = row * columns;
  State state = State::nothing();
#pragma unroll Plan::unroll
  for (int first = threadIdx.x % threads_per_row * step; first < columns; first += threads_per_row * step) {
    float values[step];
    elements.load_below(start + first, start + columns, 0.0f, vectors, values);
    state.add(values, first, columns - first);
  }
  state = reduction::merge_warp(state);
  if constexpr (warps_per_row > 1) {
    if (lane == 0) states[warp] = state;
    __syncthreads();
    if (warp > 0) return;
    state = reduction::merge_warp(lane < warps ? states[lane] : State::nothing());
  }
  if (lane > 0) return;
  const long long wanted = classes[row];
  float loss = 0.0f;
  if (wanted != ignored) {
    const bool known = wanted >= 0 && wanted < columns && state.largest < reduction::infinity();  // beside an infinity torch says nothing
    const float own = known ? elements.element(start + wanted) : not_a_number();
    loss = state.largest - own + logf(state.sum);
  }
  if constexpr (Plan::added) {
    ws_losses[row] = loss;
  } else {
    out[row] = ac::from_float<Plan::T>(loss);
  }
}

extern "C" __global__ void __launch_bounds__(adding)
cross_entropy_add_kernel(const float* ws_losses, const long long* classes, Plan::T* out, long long rows, int ignored) {
  __shared__ float scratch[adding / ac::warp_size];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  float sum = 0.0f;
  float count = 0.0f;
  for (long long row = threadIdx.x; row < rows; row += adding) {
    sum += ac::load_relaxed(&ws_losses[row]);
    if (classes[row] != ignored) count += 1.0f;
  }
  const int warp = threadIdx.x / ac::warp_size;
  const int lane = threadIdx.x % ac::warp_size;
  sum = ac::block_sum<adding / ac::warp_size>(sum, scratch, warp, lane);
  count = ac::block_sum<adding / ac::warp_size>(count, scratch, warp, lane);
  if (threadIdx.x == 0) out[0] = ac::from_float<Plan::T>(Plan::mean ? sum / count : sum);
}
