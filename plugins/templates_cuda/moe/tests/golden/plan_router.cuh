// Written by AgentCompile: the choices of one schedule.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>

struct Plan_DIGEST {
  using Logit = __nv_bfloat16;
  using RouterBias = float;
  using Score = __nv_bfloat16;
  static constexpr int held = 4;
  static constexpr bool over_chosen = true;
  static constexpr bool sigmoid = false;
  static constexpr bool biased = false;
  static constexpr bool floored = false;
  static constexpr bool pdl = true;
};
