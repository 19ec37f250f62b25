// RoPE tables of one position: cos and sin of position * inv_freq, each frequency standing twice, times attention_scaling:
// once in either half (HuggingFace's cat(freqs, freqs)) or, Plan::interleaved, two times behind each other.
//
// position [1]; inv_freq [half] fp32; cos, sin [2 * half]. The product is rounded to fp32 and the functions are the
// full-range ones, as in the framework: at position 100,000 one ulp of the angle is already 0.008.
// Wins over the framework's six operators wherever a decode step is captured; it is launched once per step.
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include "plan.cuh"

extern "C" __global__ void __launch_bounds__(Plan::threads)
rope_table_kernel(const long long* position, const float* inv_freq, Plan::T* cos, Plan::T* sin, int half,
                  float attention_scaling) {
  if (Plan::pdl) ac::launch_dependents();
  const int i = blockIdx.x * Plan::threads + threadIdx.x;
  const float frequency = i < half ? inv_freq[i] : 0.0f;
  ac::grid_dependency_wait();
  if (i >= half) return;
  const float angle = static_cast<float>(ac::load_relaxed(position)) * frequency;
  const Plan::T cosine = ac::from_float<Plan::T>(cosf(angle) * attention_scaling);
  const Plan::T sine = ac::from_float<Plan::T>(sinf(angle) * attention_scaling);
  const int first = Plan::interleaved ? 2 * i : i;
  const int second = Plan::interleaved ? first + 1 : i + half;
  cos[first] = cosine;
  cos[second] = cosine;
  sin[first] = sine;
  sin[second] = sine;
}
