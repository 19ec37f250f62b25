// Plan_224f0fdf57af5b96 is what the schedule chose; Planner is not renamed.
#include "plan.cuh"
static constexpr int replan = Plan_224f0fdf57af5b96::threads;
extern "C" __global__ void __launch_bounds__(Plan_224f0fdf57af5b96::threads) first_kernel_224f0fdf57af5b96(const Plan_224f0fdf57af5b96::T* x, float* out) {
  out[0] = Epilogue_224f0fdf57af5b96::apply(nullptr, nullptr);
}
extern "C" __global__ void first_kernel_tail_224f0fdf57af5b96(float* out) { out[0] = 0.0f; }
