// Reduction of rows, the last axes: out[r] over c of x[r, c], or the first place of an extreme, or both.
//
// x [rows, columns] is the plan's expression over in0, in1, in2; out, indices [rows]. A row, or one of `splits` parts of it,
// belongs to Plan::lanes neighbouring lanes (several rows per warp), to one warp or to all warps of the block. Threads take 16
// bytes at a time, and Plan::unroll of them are on their way before the first is used; where the length or the address of rows
// allows no vectors, neighbouring threads take neighbouring elements. Where rows are split, the parts' states go to ws_states
// [splits, rows, words], and a second launch merges them, a warp per row. Where Plan::columns is not 0 rows have that many elements,
// and where Plan::part is not 0 so many are in every part: what is told at launch says the same, but nothing folds or unrolls by it.
// A few lanes per row win where rows are short and many, a block where they are long, parts where rows are fewer than SMs.
#include "plan.cuh"
#include "finish.cuh"

namespace {

constexpr int warps = Plan::threads / ac::warp_size;
constexpr int warps_per_row = Plan::warps_per_row;
constexpr int lanes = Plan::lanes;  // of a warp, that share a row or a part of it
constexpr int threads_per_row = warps_per_row * lanes;
constexpr int rows_per_block = Plan::threads / threads_per_row;
constexpr int unroll = Plan::unroll;
static_assert(warps_per_row == 1 || (rows_per_block == 1 && lanes == ac::warp_size), "a row belongs to lanes of one warp or to the whole block");

// The least power of two that is not below `count`.
constexpr int power_of_two(int count) { return count > 1 ? 2 * power_of_two((count + 1) / 2) : 1; }

// The elements begin .. end - 1 of a row that starts at `row`; both are multiples of a step.
__device__ __forceinline__ State scan_vectors(const Elements& elements, long long row, int begin, int end, int thread) {
  constexpr int stride = threads_per_row * step;
  State state = State::nothing();
  int first = begin + thread * step;
  Elements::Fetched<step> some[unroll];
  const auto turn = [&](auto exists) {  // the next `unroll` steps, as far as they exist
#pragma unroll
    for (int i = 0; i < unroll; ++i) {
      if (exists(i)) elements.fetch<Plan::past_l1>(row + first + i * stride, some[i]);
    }
#pragma unroll
    for (int i = 0; i < unroll; ++i) {
      if (!exists(i)) continue;
      float values[step];
      elements.evaluate(some[i], values);
      state.add(values, first + i * stride, step);
    }
    first += unroll * stride;
  };
  const auto all = [](int) { return true; };
  if constexpr (Plan::part > 0) {
    constexpr int steps = Plan::part / stride;  // that every thread has
    constexpr int turns = steps / unroll;
#pragma unroll(turns <= 2 ? 2 : 1)
    for (int i = 0; i < turns; ++i) turn(all);
    turn([&](int i) { return i < steps % unroll || (i == steps % unroll && Plan::part % stride != 0 && first + i * stride < end); });
  } else {
    while (first + (unroll - 1) * stride < end) turn(all);
    turn([&](int i) { return i < unroll - 1 && first + i * stride < end; });
  }
  return state;
}

// The same of any begin and end.
__device__ __forceinline__ State scan_elements(const Elements& elements, long long row, int begin, int end, int thread) {
  State state = State::nothing();
#pragma unroll 1
  for (int first = begin + thread; first < end; first += step * threads_per_row) {
    float values[step];
#pragma unroll
    for (int e = 0; e < step; ++e) {
      const int place = first + e * threads_per_row;
      values[e] = place < end ? elements.element(row + place) : 0.0f;
    }
    state.add(values, first, (end - first + threads_per_row - 1) / threads_per_row, threads_per_row);
  }
  return state;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
reduction_kernel(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, Plan::T* out, long long* indices, float* ws_states,
                 long long rows, int columns, int part, float scale, long long period0, long long period1, long long period2) {
  __shared__ __align__(16) State states[warps];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const int warp = threadIdx.x / ac::warp_size;
  const int thread = rows_per_block == 1 ? threadIdx.x : threadIdx.x % threads_per_row;
  if constexpr (Plan::columns > 0) columns = Plan::columns;
  if constexpr (Plan::part > 0) part = Plan::part;
  const long long block = blockIdx.x;
  const long long own = rows_per_block == 1 ? block : block * rows_per_block + threadIdx.x / threads_per_row;
  const long long row = rows_per_block == 1 ? own : min(own, rows - 1);  // lanes without a row stay for the shuffles of the others
  const Elements elements = elements_of(in0, in1, in2, period0, period1, period2);
  const int begin = Plan::split ? static_cast<int>(blockIdx.y) * part : 0;
  const int end = Plan::part > 0 ? begin + part : min(begin + part, columns);
  const bool vectors = columns % step == 0 && elements.in_vectors<step>();
  State state = vectors ? scan_vectors(elements, row * columns, begin, end, thread)
                        : scan_elements(elements, row * columns, begin, end, thread);
  state = reduction::merge_warp<lanes>(state);
  if constexpr (warps_per_row > 1) {
    const int lane = threadIdx.x % ac::warp_size;
    if (lane == 0) states[warp] = state;
    __syncthreads();
    if (warp > 0) return;
    if constexpr (State::words == 1) {
      state = reduction::merge_in_pairs(states);
    } else {
      state = reduction::merge_warp<power_of_two(warps)>(lane < warps ? states[lane] : State::nothing());
    }
  }
  if (thread > 0 || (rows_per_block > 1 && own >= rows)) return;
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
