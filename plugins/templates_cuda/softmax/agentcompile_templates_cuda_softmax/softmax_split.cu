// Softmax or log-softmax of few long rows, each dealt out to several blocks: out [rows, columns] as softmax.cu.
//
// Two launches over the grid (splits, rows). The first finds maximum and sum of every part of a row, in one pass, and leaves
// them in ws_maxima, ws_sums [rows, splits]; the second merges the parts of its row, in a fixed order, reads its own part
// again and writes. A part is `part` neighbouring elements, a multiple of Plan::step.
// Wins where there are fewer rows than SMs and each is long enough to pay for the second launch.
#include "plan.cuh"
#include "softmax_blocks.cuh"

namespace {

constexpr int warps = Plan::threads / ac::warp_size;

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
softmax_parts_kernel(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, float* ws_maxima, float* ws_sums, int columns, int part,
                     long long period0, long long period1, long long period2) {
  __shared__ Online states[warps];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const Scores scores = scores_of(in0, in1, in2, period0, period1, period2);
  const bool vectors = columns % Plan::step == 0 && scores.in_vectors<Plan::step>();
  const long long row = static_cast<long long>(blockIdx.y) * columns;
  const long long first = static_cast<long long>(blockIdx.x) * part;
  const long long end = min(first + part, static_cast<long long>(columns));
  const Online state = scan<warps>(scores, row + first, row + end, vectors, states);
  if (threadIdx.x == 0) {
    ws_maxima[blockIdx.y * gridDim.x + blockIdx.x] = state.maximum;
    ws_sums[blockIdx.y * gridDim.x + blockIdx.x] = state.sum;
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads)
softmax_write_kernel(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, const float* ws_maxima, const float* ws_sums,
                     Plan::T* out, int columns, int part, long long period0, long long period1, long long period2) {
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  Online whole = Online::nothing();
  for (int split = threadIdx.x % ac::warp_size; split < static_cast<int>(gridDim.x); split += ac::warp_size) {
    const int place = blockIdx.y * gridDim.x + split;
    whole.add(Online{ac::load_relaxed(&ws_maxima[place]), ac::load_relaxed(&ws_sums[place])});
  }
  whole.merge_warp();
  const Scores scores = scores_of(in0, in1, in2, period0, period1, period2);
  const bool vectors = columns % Plan::step == 0 && ac::is_aligned16(out) && scores.in_vectors<Plan::step>();
  const long long row = static_cast<long long>(blockIdx.y) * columns;
  const long long first = static_cast<long long>(blockIdx.x) * part;
  write(scores, whole, row + first, row + min(first + part, static_cast<long long>(columns)), vectors, out);
}
