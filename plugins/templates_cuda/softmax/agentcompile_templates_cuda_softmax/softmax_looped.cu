// Softmax or log-softmax of rows of any length, a block per row: out [rows, columns] as softmax.cu.
//
// One pass finds maximum and sum together (the sum is scaled whenever the maximum grows); a second one reads the row again,
// from L2 where it mostly still is, and writes.
// Wins where a row does not fit into the registers of a block and there are enough rows to fill the device.
#include "plan.cuh"
#include "softmax_blocks.cuh"

namespace {

constexpr int warps = Plan::threads / ac::warp_size;
constexpr int step = Plan::step;

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
softmax_looped_kernel(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, Plan::T* out, int columns,
                      long long period0, long long period1, long long period2) {
  __shared__ Online states[warps];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const Scores scores = scores_of(in0, in1, in2, period0, period1, period2);
  const bool vectors = columns % step == 0 && ac::is_aligned16(out) && scores.in_vectors<step>();
  const long long row = static_cast<long long>(blockIdx.x) * columns;
  const Online whole = scan<warps>(scores, row, row + columns, vectors, states);
  write(scores, whole, row, row + columns, vectors, out);
}
