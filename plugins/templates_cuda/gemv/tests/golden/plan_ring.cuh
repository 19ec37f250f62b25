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
  static constexpr int threads = 288;
  static constexpr int warps = 8;
  static constexpr int blocks_per_sm = 2;
  static constexpr int rows = 1;
  static constexpr int columns = 1024;
  static constexpr int stages = 3;
  static constexpr int in_flight = 2;
  static constexpr bool full_stages = true;
  static constexpr int static_groups = 0;
  static constexpr int resident = 2;
  static constexpr int held_vectors = 1;
  static constexpr int pair = 2;
  static constexpr int norm = 1;
  static constexpr int k = 2048;
  static constexpr bool has_norm_out = false;
  static constexpr bool has_residual = false;
  static constexpr bool has_aux0 = false;
  static constexpr bool has_aux1 = false;
  static constexpr int post_norm = 0;
};

struct Epilogue_DIGEST {
  static __device__ __forceinline__ float apply(const float* acc, const float* aux) {
    (void)aux;
    const float v0 = ac::silu(acc[0]);
    const float v1 = v0 * acc[1];
    return v1;
  }
};
