// Running sums or products along rows, the last axis: out[r, c] over c' up to c (from the end where Plan::reverse) of x[r, c'].
//
// x [rows, columns] is the plan's expression over in0, in1, in2; out [rows, columns]. A row belongs to Plan::warps_per_row warps: one
// (several rows per block) or all of the block's. In one turn each warp runs through Plan::vectors steps per lane, then the warps meet
// once; the next turn's elements are on their way meanwhile. Where a row is dealt out to `splits` blocks, a first launch leaves what
// each part joins to in ws_totals [rows, splits], and the second begins with the parts before its own and reads its part again.
// One warp per row wins where rows are short and many, parts where rows are fewer than SMs.
#include "plan.cuh"
#include "scan.cuh"

namespace {

constexpr int warps = Plan::threads / ac::warp_size;
constexpr int warps_per_row = Plan::warps_per_row;
constexpr int rows_per_block = warps / warps_per_row;
constexpr int vectors = Plan::vectors;
constexpr int of_warp = ac::warp_size * step * vectors;  // elements of a warp in a turn
static_assert(warps_per_row == 1 || rows_per_block == 1, "a row belongs to one warp or to the whole block");

// A line of `columns` elements from `row` on, of which numbers below `end` are run through; `whole`: in steps of 16 bytes.
struct Line {
  Elements elements;
  long long row;
  int columns;
  int end;
  bool whole;

  __device__ __forceinline__ void load(int first, float (&values)[step]) const {
    if constexpr (!Plan::reverse) {
      elements.load_below(row + first, row + end, neutral, whole, values);
    } else {
      float turned[step];
      if (whole && first < end) {
        elements.load(row + columns - first - step, turned);
      } else {
#pragma unroll
        for (int e = 0; e < step; ++e) turned[step - 1 - e] = first + e < end ? elements.element(row + columns - 1 - first - e) : neutral;
      }
#pragma unroll
      for (int e = 0; e < step; ++e) values[e] = turned[step - 1 - e];
    }
  }

  __device__ __forceinline__ void store(const float (&values)[step], Plan::T* out, int first) const {
    if constexpr (!Plan::reverse) {
      ac::store_below(values, out, row + first, row + end, whole);
    } else {
      float turned[step];
#pragma unroll
      for (int e = 0; e < step; ++e) turned[e] = values[step - 1 - e];
      if (whole) {
        if (first < end) ac::store_below(turned, out, row + columns - first - step, row + columns, true);
      } else {
#pragma unroll
        for (int e = 0; e < step; ++e) {
          if (first + e < end) out[row + columns - 1 - first - e] = ac::from_float<Plan::T>(values[e]);
        }
      }
    }
  }
};

// One turn of a warp: every element becomes the join of the warp's elements up to it; returns that of all.
__device__ __forceinline__ float run_warp(float (&values)[vectors][step], int lane) {
  float total = neutral;
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
#pragma unroll
    for (int e = 1; e < step; ++e) values[v][e] = join(values[v][e - 1], values[v][e]);
    float own = values[v][step - 1];
#pragma unroll
    for (int offset = 1; offset < ac::warp_size; offset *= 2) {
      const float earlier = __shfl_up_sync(ac::full_warp, own, offset);
      if (lane >= offset) own = join(earlier, own);
    }
    const float previous = __shfl_up_sync(ac::full_warp, own, 1);
    const float before = lane == 0 ? total : join(total, previous);
#pragma unroll
    for (int e = 0; e < step; ++e) values[v][e] = join(before, values[v][e]);
    total = join(total, __shfl_sync(ac::full_warp, own, ac::warp_size - 1));
  }
  return total;
}

// Runs through the elements from `begin` on behind `carry`, writes them where Write, and returns what all join to.
template <bool Write> __device__ __forceinline__ float run(const Line& line, Plan::T* out, int begin, float carry, float (*totals)[warps]) {
  const int lane = threadIdx.x % ac::warp_size;
  const int warp = warps_per_row == 1 ? 0 : threadIdx.x / ac::warp_size;
  const int own = warp * of_warp + lane * step;
  float ahead[vectors][step];
#pragma unroll
  for (int v = 0; v < vectors; ++v) line.load(begin + own + v * ac::warp_size * step, ahead[v]);
  int turn = 0;
#pragma unroll 1
  for (int first = begin; first < line.end; first += warps_per_row * of_warp) {
    float values[vectors][step];
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
#pragma unroll
      for (int e = 0; e < step; ++e) values[v][e] = ahead[v][e];
      line.load(first + warps_per_row * of_warp + own + v * ac::warp_size * step, ahead[v]);
    }
    const float total = run_warp(values, lane);
    float before = carry;
    if constexpr (warps_per_row > 1) {
      if (lane == 0) totals[turn][warp] = total;
      __syncthreads();
#pragma unroll
      for (int other = 0; other < warps_per_row; ++other) {
        if (other == warp) before = carry;
        carry = join(carry, totals[turn][other]);
      }
      turn ^= 1;  // the other half was last read before this barrier
    } else {
      carry = join(carry, total);
    }
    if constexpr (Write) {
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
#pragma unroll
        for (int e = 0; e < step; ++e) values[v][e] = join(before, values[v][e]);
        line.store(values[v], out, first + own + v * ac::warp_size * step);
      }
    }
  }
  return carry;
}

__device__ __forceinline__ Line line_of(const Elements& elements, const Plan::T* out, long long row, int columns, int end) {
  return Line{elements, row * columns, columns, end, columns % step == 0 && ac::is_aligned16(out) && elements.in_vectors<step>()};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
scan_kernel(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, Plan::T* out, long long rows, int columns, long long period0,
            long long period1, long long period2) {
  __shared__ float totals[2][warps];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const long long row = static_cast<long long>(blockIdx.x) * rows_per_block + (warps_per_row == 1 ? threadIdx.x / ac::warp_size : 0);
  if (row >= rows) return;
  const Elements elements = elements_of(in0, in1, in2, period0, period1, period2);
  run<true>(line_of(elements, out, row, columns, columns), out, 0, neutral, totals);
}

extern "C" __global__ void __launch_bounds__(Plan::threads)
scan_parts_kernel(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, float* ws_totals, int columns, int part,
                  long long period0, long long period1, long long period2) {
  __shared__ float totals[2][warps];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const Elements elements = elements_of(in0, in1, in2, period0, period1, period2);
  const int begin = blockIdx.x * part;
  const int end = min(static_cast<long long>(begin) + part, static_cast<long long>(columns));
  const float total = run<false>(line_of(elements, nullptr, blockIdx.y, columns, end), nullptr, begin, neutral, totals);
  if (threadIdx.x == 0) ws_totals[blockIdx.y * gridDim.x + blockIdx.x] = total;
}

extern "C" __global__ void __launch_bounds__(Plan::threads)
scan_write_kernel(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, const float* ws_totals, Plan::T* out, int columns, int part,
                  long long period0, long long period1, long long period2) {
  __shared__ float totals[2][warps];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  float before = neutral;
  for (int split = threadIdx.x % ac::warp_size; split < static_cast<int>(blockIdx.x); split += ac::warp_size) {
    before = join(before, ac::load_relaxed(&ws_totals[blockIdx.y * gridDim.x + split]));
  }
#pragma unroll
  for (int offset = ac::warp_size / 2; offset > 0; offset /= 2) before = join(before, __shfl_xor_sync(ac::full_warp, before, offset));
  const Elements elements = elements_of(in0, in1, in2, period0, period1, period2);
  const int begin = blockIdx.x * part;
  const int end = min(static_cast<long long>(begin) + part, static_cast<long long>(columns));
  run<true>(line_of(elements, out, blockIdx.y, columns, end), out, begin, before, totals);
}
