// Softmax or log-softmax of rows that fit into registers: out[r, c] = exp(s[r, c] - max s[r]) / sum exp(s[r, :] - max s[r]).
//
// s [rows, columns] is the plan's expression over in0, in1, in2; out [rows, columns] contiguous. A row belongs to Plan::lanes
// neighbouring lanes (several rows per warp), to one warp or to all warps of the block. Each thread keeps its Plan::held *
// Plan::step scores in registers, all of their loads on the way before the first is used; every score is read once and has one
// exponential. Steps are 16 bytes; where the length or an address allows no vectors, neighbouring threads have neighbouring scores.
// Wins wherever a row fits; a few lanes per row where rows are short and many, a block where they are long or few.
#include "plan.cuh"
#include "softmax.cuh"

namespace {

constexpr int warps = Plan::threads / ac::warp_size;
constexpr int warps_per_row = Plan::warps_per_row;
constexpr int threads_per_row = warps_per_row * Plan::lanes;
constexpr int rows_per_block = Plan::threads / threads_per_row;
constexpr int held = Plan::held;
constexpr int step = Plan::step;
static_assert(warps_per_row == 1 || (rows_per_block == 1 && Plan::lanes == ac::warp_size), "a row belongs to lanes of one warp or to the whole block");

// Where the i-th step of a thread begins in its row, and where its element e lies if steps are no vectors.
__device__ __forceinline__ int place_of(int i, int thread) { return (i * threads_per_row + thread) * step; }
__device__ __forceinline__ int place_of(int i, int e, int thread) { return (i * step + e) * threads_per_row + thread; }

// Whether the i-th step of a thread lies in its row: all but the last one do.
__device__ __forceinline__ bool in_row(int i, int thread, int columns) {
  return (!Plan::ragged || i + 1 < held) ? true : place_of(i, thread) < columns;
}

// The scores of a thread, minus infinity behind the end of the row.
__device__ __forceinline__ void read(const Scores& scores, long long row, int columns, bool vectors, int thread, float (&values)[held][step]) {
  if (vectors) {
    Scores::Fetched<step> steps[held] = {};
#pragma unroll
    for (int i = 0; i < held; ++i) {
      if (in_row(i, thread, columns)) scores.fetch<Plan::past_l1>(row + place_of(i, thread), steps[i]);
    }
#pragma unroll
    for (int i = 0; i < held; ++i) {
      scores.evaluate(steps[i], values[i]);
#pragma unroll
      for (int e = 0; e < step; ++e) values[i][e] = in_row(i, thread, columns) ? values[i][e] : minus_infinity();
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < held; ++i) {
#pragma unroll
    for (int e = 0; e < step; ++e) {
      const int place = place_of(i, e, thread);
      values[i][e] = place < columns ? scores.element(row + place) : minus_infinity();
    }
  }
}

// Results to where `read` found the scores.
__device__ __forceinline__ void write(const float (&values)[held][step], T* out, long long row, int columns, bool vectors, int thread) {
  if (vectors) {
#pragma unroll
    for (int i = 0; i < held; ++i) {
      if (in_row(i, thread, columns)) ac::store_below(values[i], out, row + place_of(i, thread), row + columns, true);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < held; ++i) {
#pragma unroll
    for (int e = 0; e < step; ++e) {
      const int place = place_of(i, e, thread);
      if (place < columns) out[row + place] = ac::from_float<T>(values[i][e]);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks)
softmax_kernel(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, Plan::T* out, long long rows, int columns,
               long long period0, long long period1, long long period2) {
  __shared__ Online states[warps];
  if (Plan::pdl) ac::launch_dependents();
  if constexpr (Plan::columns > 0) columns = Plan::columns;
  ac::grid_dependency_wait();
  const int thread = threadIdx.x % threads_per_row;
  const long long own_row = static_cast<long long>(blockIdx.x) * rows_per_block + threadIdx.x / threads_per_row;
  const long long row = (own_row < rows ? own_row : rows - 1) * columns;  // lanes without a row stay for the shuffles of the others
  const Scores scores = scores_of(in0, in1, in2, period0, period1, period2);
  const bool vectors = columns % step == 0 && ac::is_aligned16(out) && scores.in_vectors<step>();

  float values[held][step];
  read(scores, row, columns, vectors, thread, values);
  Online own = Online::nothing();
#pragma unroll
  for (int i = 0; i < held; ++i) {
#pragma unroll
    for (int e = 0; e < step; ++e) own.maximum = fmaxf(own.maximum, values[i][e]);
  }
#pragma unroll
  for (int i = 0; i < held; ++i) {
#pragma unroll
    for (int e = 0; e < step; ++e) {
      const float power = exponential(values[i][e] - own.maximum);
      own.sum += power;
      if constexpr (!Plan::log) values[i][e] = power;  // relative to the thread's own maximum
    }
  }
  Online whole = own;
  if constexpr (warps_per_row > 1) {
    whole = merge_block<warps_per_row>(own, states, threadIdx.x / ac::warp_size, threadIdx.x % ac::warp_size);
  } else {
    whole.merge_warp<threads_per_row>();
  }
  const float factor = Plan::log ? whole.factor() : whole.factor() * expf(own.maximum - whole.maximum);
#pragma unroll
  for (int i = 0; i < held; ++i) {
#pragma unroll
    for (int e = 0; e < step; ++e) {
      values[i][e] = Plan::log ? result(values[i][e], whole.maximum, factor) : values[i][e] * factor;
    }
  }
  if (own_row < rows) write(values, out, row, columns, vectors, thread);
}
