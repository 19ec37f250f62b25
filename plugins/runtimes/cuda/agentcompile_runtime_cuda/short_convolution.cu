// Short causal convolutions over the tokens of a chunk, and the last columns that the next tokens read:
//
//   out[t, c] = act(sum over k of weight[c, k] column[t + 1 + k, c] + bias[c])     columns: those of `state`, then those of x
//   last[c, k] = column[live + k, c]
//
// `last` may be `state` where one thread has all tokens of a channel.
// x [T, channels] by its stride of tokens, channels side by side; state and last [channels, width]; weight [channels, width]; bias [channels]
// or null; out [T, channels], dense; `valid`: i64 [1], how many of the tokens count (null: all). fp32 sums, rounded before the activation as
// the framework rounds them.
//
// A thread has one vector of channels and Plan::run tokens in a row: of each token it reads one vector, the last `width` stay in registers.
// Wins over cat, conv1d, slice and activation by what these write and read again, with channels and tokens exchanged in between.
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>

#include "plan.cuh"

namespace {

using T = Plan::T;
using Vector = ac::Vec16<T>;
constexpr int size = Vector::size, width = Plan::width, run = Plan::run;

__device__ __forceinline__ float activated(float x) {
  if constexpr (!Plan::silu) return x;
  return ac::silu(ac::round_to<T>(x));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
causal_convolution(const Plan::T* state, const Plan::T* x, const Plan::T* weight, const Plan::T* bias, const long long* valid,
                   Plan::T* out, Plan::T* last, int tokens, int channels, int x_token) {
  ac::launch_dependents();
  ac::grid_dependency_wait();
  const int vectors = channels / size;
  const int item = static_cast<int>(blockIdx.x) * Plan::threads + static_cast<int>(threadIdx.x);
  const int first = item / vectors * run, channel = item % vectors * size;
  if (first >= tokens) return;

  float weights[width][size], added[size] = {}, window[width][size];
#pragma unroll
  for (int k = 0; k < width; ++k) {
#pragma unroll
    for (int e = 0; e < size; ++e) weights[k][e] = ac::to_float(weight[(channel + e) * width + k]);
  }
  if (bias != nullptr) Vector::load(bias + channel).unpack(added);

  auto column = [&](int token, float (&to)[size]) {  // of x, or from -width on of the state
    if (token >= 0) {
      Vector::load(x + static_cast<long long>(token) * x_token + channel).unpack(to);
    } else {
#pragma unroll
      for (int e = 0; e < size; ++e) to[e] = ac::to_float(state[(channel + e) * width + width + token]);
    }
  };

#pragma unroll
  for (int k = 1; k < width; ++k) column(first + k - width, window[k]);  // before the last columns are written, maybe over the state
  if (first == 0) {
    const int live = valid == nullptr ? tokens : static_cast<int>(max(0ll, min(static_cast<long long>(tokens), valid[0])));
    for (int k = 0; k < width; ++k) {
      float kept[size];
      column(live + k - width, kept);
#pragma unroll
      for (int e = 0; e < size; ++e) last[(channel + e) * width + k] = ac::from_float<T>(kept[e]);
    }
  }

#pragma unroll 4
  for (int token = first; token < min(first + run, tokens); ++token) {
#pragma unroll
    for (int k = 1; k < width; ++k) {
#pragma unroll
      for (int e = 0; e < size; ++e) window[k - 1][e] = window[k][e];
    }
    column(token, window[width - 1]);
    float sums[size];
#pragma unroll
    for (int e = 0; e < size; ++e) {
      sums[e] = added[e];
#pragma unroll
      for (int k = 0; k < width; ++k) sums[e] = fmaf(weights[k][e], window[k][e], sums[e]);
      sums[e] = activated(sums[e]);
    }
    Vector::pack(sums).store(out + static_cast<long long>(token) * channels + channel);
  }
}
