// What both decode attention kernels share: operands, the shared memory of the merge, and the end of a block.
//
// Layouts: q [kv_heads * group * D]; out the same with V's width Dv; k [kv_heads * D]; v [kv_heads * Dv]; caches [capacity,
// kv_heads, D or Dv]; cos, sin [rotary_dim];
// position: the index of the token being decoded, so the length is position + 1. Grid (splits, kv_heads).
#pragma once
#include <agentcompile/head.cuh>
#include <agentcompile/split.cuh>
#include "plan.cuh"

namespace {

using T = Plan::T;
constexpr int head_dim = Plan::head_dim;    // of Q and K
constexpr int value_dim = Plan::value_dim;  // of V and the output
constexpr int group = Plan::group;    // query heads per KV head
constexpr int unroll = Plan::unroll;  // positions (lanes) or 16-position steps (tensor) in flight
constexpr int warps = Plan::threads / ac::warp_size;
constexpr float log2_e = 1.4426950408889634f;

// Absent operands are null.
struct Operands {
  const T* q;
  const T* k;
  const T* v;
  const T* q_norm;
  const T* k_norm;
  const T* cos;
  const T* sin;
  T* k_cache;
  T* v_cache;
  const long long* position;
  const Plan::Sink* sinks;
  T* out;
  float* workspace;
  unsigned int* counters;
  int kv_heads;
  int capacity;
  float scale;
  float norm_eps;
  int window;
  float softcap;
};

// The shared memory that the merge works in.
struct Buffers {
  float (&outputs)[warps][group * value_dim];
  float2 (&states)[warps][group];
  ac::ClusterParts<Plan::cluster, group, value_dim>& parts;
  bool* last;
};

// The end of a block: merges the warps, then the splits, and writes this KV head's outputs.
__device__ __forceinline__ void merge(const Operands& operands, int kv_head, int active, const Buffers& buffers) {
  T* out_heads = operands.out + kv_head * group * value_dim;
  auto finish = [&](int i, float total, ac::SoftmaxState state) {
    if constexpr (Plan::has_sinks) {
      const float sink = ac::to_float(operands.sinks[kv_head * group + i / value_dim]) * log2_e;
      out_heads[i] = ac::from_float<T>(ac::softmax_divide_with_sink(total, state, sink));
    } else {
      out_heads[i] = ac::from_float<T>(ac::softmax_divide(total, state));
    }
  };
  ac::merge_attention<Plan::threads, warps, group, value_dim, Plan::cluster>(buffers.outputs, buffers.states, buffers.parts,
                                                                           operands.workspace, operands.counters + kv_head, active,
                                                                           buffers.last, finish);
}

}  // namespace
