// Written by AgentCompile: the choices of one schedule.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>

struct Plan_224f0fdf57af5b96 {
  using T = __nv_bfloat16;
  static constexpr int threads = 32;
  static constexpr bool pdl = true;
  static constexpr float eps = 1e-06f;
  static constexpr long long huge = 1099511627776ll;
};

struct Epilogue_224f0fdf57af5b96 {
  static __device__ __forceinline__ float apply(const float* acc, const float* aux) {
    const float v0 = acc[0] + aux[0];
    const float v1 = ac::round_to<Plan_224f0fdf57af5b96::T>(v0);
    const float v2 = v1 + aux[1];
    return v2;
  }
};
