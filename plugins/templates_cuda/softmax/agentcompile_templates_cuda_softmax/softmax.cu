// Softmax or log-softmax of rows that fit into registers: out[r, c] = exp(s[r, c] - max s[r]) / sum exp(s[r, :] - max s[r]).
//
// s [rows, columns] is the plan's expression over in0, in1, in2; out [rows, columns] contiguous. A row belongs to
// Plan::warps_per_row warps: one (several rows per block) or all of the block's. Each thread keeps its Plan::held *
// Plan::step scores in registers, so that every score is read once and has one exponential.
// Wins wherever a row fits; one warp per row where rows are short and many, a block where they are long or few.
#include "plan.cuh"
#include "softmax.cuh"

namespace {

constexpr int warps = Plan::threads / ac::warp_size;
constexpr int warps_per_row = Plan::warps_per_row;
constexpr int rows_per_block = warps / warps_per_row;
constexpr int threads_per_row = warps_per_row * ac::warp_size;
constexpr int held = Plan::held;
constexpr int step = Plan::step;
static_assert(warps_per_row == 1 || rows_per_block == 1, "a row belongs to one warp or to the whole block");

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
softmax_kernel(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, Plan::T* out, long long rows, int columns,
               long long period0, long long period1, long long period2) {
  __shared__ Online states[warps];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const int warp = threadIdx.x / ac::warp_size;
  const int lane = threadIdx.x % ac::warp_size;
  const int thread = threadIdx.x % threads_per_row;
  const long long row = static_cast<long long>(blockIdx.x) * rows_per_block + (warps_per_row == 1 ? warp : 0);
  if (row >= rows) return;
  const Scores scores = scores_of(in0, in1, in2, period0, period1, period2);
  const bool vectors = columns % step == 0 && ac::is_aligned16(out) && scores.in_vectors<step>();
  const long long begin = row * columns;
  const long long end = begin + columns;
  const auto first_of = [&](int i) { return begin + (static_cast<long long>(i) * threads_per_row + thread) * step; };

  float values[held][step];
  Online own = Online::nothing();
#pragma unroll
  for (int i = 0; i < held; ++i) {
    scores.load_below(first_of(i), end, minus_infinity(), vectors, values[i]);
#pragma unroll
    for (int e = 0; e < step; ++e) own.maximum = fmaxf(own.maximum, values[i][e]);
  }
#pragma unroll
  for (int i = 0; i < held; ++i) {
#pragma unroll
    for (int e = 0; e < step; ++e) {
      const float power = expf(values[i][e] - own.maximum);
      own.sum += power;
      if constexpr (!Plan::log) values[i][e] = power;  // relative to the thread's own maximum
    }
  }
  const Online whole = merge_block<warps_per_row>(own, states, warp, lane);
  const float factor = Plan::log ? whole.factor() : whole.factor() * expf(own.maximum - whole.maximum);
#pragma unroll
  for (int i = 0; i < held; ++i) {
#pragma unroll
    for (int e = 0; e < step; ++e) {
      values[i][e] = Plan::log ? result(values[i][e], whole.maximum, factor) : values[i][e] * factor;
    }
    ac::store_below(values[i], out, first_of(i), end, vectors);
  }
}
