// Pointwise activations in fp32, with torch's definitions: NaN goes through, infinities have torch's limits. The caller
// rounds. Full-precision math functions: an epilogue evaluates one per output row, so that the fast intrinsics would gain
// nothing there, and fp32 models must agree with the framework.
#pragma once
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>

namespace ac {

// By exp(-|x|), which is at most 1: the divisor lies in [1, 2], so that a reciprocal of one instruction does. The general division
// of 128 x 2048 elements took 0.36 us of 2.73 (H200).
__device__ __forceinline__ float sigmoid(float x) {
  const float small = expf(-fabsf(x));
  return (x < 0.0f ? small : 1.0f) * quick_reciprocal(1.0f + small);
}
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
__device__ __forceinline__ float relu(float x) { return x < 0.0f ? 0.0f : x; }
__device__ __forceinline__ float tanh(float x) { return tanhf(x); }

// torch.nn.functional.gelu(x): 0.5 x (1 + erf(x / sqrt 2)).
__device__ __forceinline__ float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }

// torch.nn.functional.gelu(x, approximate="tanh"), also HuggingFace's gelu_new and gelu_pytorch_tanh.
__device__ __forceinline__ float gelu_tanh(float x) {
  const float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + tanhf(inner));
}

// Gates of half precision: activation(gate) * up, rounded to T as often as the framework does that stores each of them. What is rounded
// to half needs no full-precision exponential: one of the hardware's and a reciprocal do, which kernels evaluate that otherwise wait for
// memory or for products. Where the exponential passes 2^126 the reciprocal is 0: below -87 SiLU is -0 instead of at most 1e-36.
constexpr int gate_silu = 0;
constexpr int gate_gelu = 1;
constexpr int gate_gelu_tanh = 2;
constexpr int gate_relu = 3;

__device__ __forceinline__ float quick_sigmoid(float x) { return quick_reciprocal(1.0f + quick_exp(-x)); }

__device__ __forceinline__ float activated(int kind, float x) {
  if (kind == gate_gelu) return gelu(x);
  if (kind == gate_relu) return relu(x);
  // 0.5 (1 + tanh y) is the sigmoid of 2 y.
  return x * quick_sigmoid(kind == gate_silu ? x : 1.59576912160573072f * (x + 0.044715f * x * x * x));
}

template <class T> __device__ __forceinline__ float gated(int kind, float gate, float up) {
  return round_to<T>(activated(kind, round_to<T>(gate))) * round_to<T>(up);
}

}  // namespace ac
