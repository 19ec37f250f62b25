// Running sums or products along an axis that is not the last: out[o, c, i] over c' up to c (from the end where Plan::reverse) of x[o, c', i].
//
// x, out [outer, columns, inner]. A block owns 32 * Plan::step neighbouring i of one o: Plan::step per lane, so that a warp's loads lie
// side by side. In one turn each of Plan::warps warps runs through Plan::lines neighbouring c, then the warps meet once in shared memory.
// Wins over two transposed copies always; more warps where the axis is long and blocks are few.
#include "plan.cuh"
#include "scan.cuh"

namespace {

constexpr int lines = Plan::lines;

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::warps * 32)
scan_strided_kernel(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, Plan::T* out, int columns, long long inner, int tiles,
                    long long period0, long long period1, long long period2) {
  __shared__ float totals[2][Plan::warps][step][ac::warp_size];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const int warp = threadIdx.x / ac::warp_size;
  const int lane = threadIdx.x % ac::warp_size;
  const Elements elements = elements_of(in0, in1, in2, period0, period1, period2);
  const bool whole = inner % step == 0 && ac::is_aligned16(out) && elements.in_vectors<step>();
  const long long outer = blockIdx.x / tiles;
  const long long column = static_cast<long long>(blockIdx.x % tiles) * ac::warp_size * step + lane * step;
  const auto line_at = [&](int c) { return (outer * columns + (Plan::reverse ? columns - 1 - c : c)) * inner; };
  float carry[step];
#pragma unroll
  for (int e = 0; e < step; ++e) carry[e] = neutral;
  int turn = 0;
  for (int start = 0; start < columns; start += Plan::warps * lines) {
    const int first = start + warp * lines;
    float values[lines][step];
#pragma unroll
    for (int i = 0; i < lines; ++i) {
      const long long line = line_at(min(first + i, columns - 1));
      elements.load_below(line + column, first + i < columns ? line + inner : line, neutral, whole, values[i]);
    }
#pragma unroll
    for (int i = 1; i < lines; ++i) {
#pragma unroll
      for (int e = 0; e < step; ++e) values[i][e] = join(values[i - 1][e], values[i][e]);
    }
#pragma unroll
    for (int e = 0; e < step; ++e) totals[turn][warp][e][lane] = values[lines - 1][e];
    __syncthreads();
    float before[step];
#pragma unroll
    for (int e = 0; e < step; ++e) {
#pragma unroll
      for (int other = 0; other < Plan::warps; ++other) {
        if (other == warp) before[e] = carry[e];
        carry[e] = join(carry[e], totals[turn][other][e][lane]);
      }
    }
    turn ^= 1;  // the other half was last read before this barrier
#pragma unroll
    for (int i = 0; i < lines; ++i) {
      const long long line = line_at(min(first + i, columns - 1));
      float results[step];
#pragma unroll
      for (int e = 0; e < step; ++e) results[e] = join(before[e], values[i][e]);
      if constexpr (step > 1) {
        ac::store_below(results, out, line + column, first + i < columns ? line + inner : line, whole);
      } else {
        if (first + i < columns && column < inner) out[line + column] = ac::from_float<Plan::T>(results[0]);
      }
    }
  }
}
