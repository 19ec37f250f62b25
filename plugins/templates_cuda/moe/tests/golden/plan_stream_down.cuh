// Written by AgentCompile: the choices of one schedule.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>

struct Plan_DIGEST {
  using T = __nv_bfloat16;
  using Out = __nv_bfloat16;
  using Scale = __nv_bfloat16;
  using Logit = float;
  using RouterBias = float;
  using Score = float;
  static constexpr bool pdl = true;
  static constexpr int threads = 288;
  static constexpr int warps = 8;
  static constexpr int rows = 2;
  static constexpr int columns = 768;
  static constexpr int stages = 3;
  static constexpr int in_flight = 2;
  static constexpr int blocks_per_sm = 2;
  static constexpr bool early_experts = true;
  static constexpr bool late_dependents = false;
  static constexpr bool full_stages = true;
  static constexpr int pair = 1;
  static constexpr bool interleaved = false;
  static constexpr bool shared = false;
  static constexpr bool summed = true;
  static constexpr bool has_bias = false;
  static constexpr bool has_aux0 = true;
  static constexpr bool has_aux1 = false;
  static constexpr bool routed = false;
};

struct Epilogue_DIGEST {
  static __device__ __forceinline__ float apply(const float* acc, const float* aux) {
    const float v0 = aux[0] + acc[0];
    return v0;
  }
};
