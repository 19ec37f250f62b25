// Softmax or log-softmax along an axis that is not the last: out[o, c, i] over c, all [outer, columns, inner] contiguous.
//
// A block owns 32 neighbouring i of one o: a lane per i, so that a warp's loads lie side by side, and the axis dealt out to
// Plan::warps warps, whose maxima and sums meet in shared memory. Two passes, the second from L2.
// Wins over a transposed copy always; best where inner is a multiple of 32.
#include "plan.cuh"
#include "softmax.cuh"

extern "C" __global__ void __launch_bounds__(Plan::warps * 32)
softmax_strided_kernel(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, Plan::T* out, int columns, long long inner,
                       int tiles, long long period0, long long period1, long long period2) {
  __shared__ Online states[Plan::warps][ac::warp_size];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const int warp = threadIdx.x / ac::warp_size;
  const int lane = threadIdx.x % ac::warp_size;
  const long long column = static_cast<long long>(blockIdx.x % tiles) * ac::warp_size + lane;
  const bool exists = column < inner;
  const long long first = static_cast<long long>(blockIdx.x / tiles) * columns * inner + column;
  const Scores scores = scores_of(in0, in1, in2, period0, period1, period2);
  Online state = Online::nothing();
  for (int c = warp; exists && c < columns; c += Plan::warps) {
    const float score[1] = {scores.element(first + c * inner)};
    state.add(score);
  }
  states[warp][lane] = state;
  __syncthreads();
  state = states[0][lane];
#pragma unroll
  for (int other = 1; other < Plan::warps; ++other) state.add(states[other][lane]);
  const float factor = state.factor();
  for (int c = warp; exists && c < columns; c += Plan::warps) {
    const long long place = first + c * inner;
    out[place] = ac::from_float<T>(result(scores.element(place), state.maximum, factor));
  }
}
