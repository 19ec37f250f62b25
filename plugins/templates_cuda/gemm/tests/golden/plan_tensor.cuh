// Written by AgentCompile: the choices of one schedule.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>

struct Plan_DIGEST {
  using Element = __half;
  using T = __half;
  using Aux0 = __half;
  using Aux1 = __half;
  using Aux2 = __half;
  static constexpr bool pdl = true;
  static constexpr int threads = 128;
  static constexpr int rows = 32;
  static constexpr int columns = 32;
  static constexpr int depth = 32;
  static constexpr int warp_rows = 16;
  static constexpr int warp_columns = 16;
  static constexpr int stages = 4;
  static constexpr bool ahead = false;
  static constexpr bool wide_stores = false;
  static constexpr int group = 8;
  static constexpr bool split = false;
  static constexpr int a_along = 1;
  static constexpr int a_size = 8;
  static constexpr int b_along = 1;
  static constexpr int b_size = 8;
  static constexpr bool whole_stores = true;
  static constexpr int aux_kind0 = 1;
  static constexpr int aux_kind1 = 0;
  static constexpr int aux_kind2 = 4;
};

struct Epilogue_DIGEST {
  static __device__ __forceinline__ float apply(const float* acc, const float* aux) {
    const float v0 = acc[0] + aux[0];
    const float v1 = ac::gelu(v0);
    const float v2 = aux[1] + v1;
    return v2;
  }
};
