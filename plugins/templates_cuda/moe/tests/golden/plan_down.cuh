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
  static constexpr int threads = 256;
  static constexpr int warps = 8;
  static constexpr int rows = 2;
  static constexpr int unroll = 4;
  static constexpr int tile = 16;
  static constexpr bool vectors = true;
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
