// Written by AgentCompile: the choices of one schedule.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>

struct Plan_DIGEST {
  using T = __half;
  using X = __half;
  using A0 = __half;
  using A1 = __half;
  using Out = __half;
  static constexpr bool pdl = true;
  static constexpr int threads = 256;
  static constexpr int warps = 8;
  static constexpr int rows = 2;
  static constexpr int unroll = 4;
  static constexpr int warps_per_row = 1;
  static constexpr int blocks_per_sm = 4;
  static constexpr bool vectors = true;
  static constexpr int held_vectors = 3;
  static constexpr int pair = 1;
  static constexpr int norm = 0;
  static constexpr int k = 0;
  static constexpr bool has_norm_out = false;
  static constexpr bool has_residual = false;
  static constexpr bool has_aux0 = true;
  static constexpr bool has_aux1 = false;
  static constexpr int post_norm = 0;
};

struct Epilogue_DIGEST {
  static __device__ __forceinline__ float apply(const float* acc, const float* aux) {
    const float v0 = acc[0] + aux[0];
    return v0;
  }
};
