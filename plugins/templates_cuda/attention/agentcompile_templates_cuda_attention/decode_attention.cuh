#pragma once
#include <agentcompile/head.cuh>
#include <agentcompile/split.cuh>
#include "plan.cuh"

namespace {

using T = Plan::T;
constexpr int head_dim = Plan::head_dim;
constexpr int group = Plan::group;    // query heads per KV head
constexpr int unroll = Plan::unroll;  // tiles of the path's own unit in flight
constexpr int warps = Plan::threads / ac::warp_size;
constexpr float log2_e = 1.4426950408889634f;

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
  float (&outputs)[warps][group * head_dim];
  float2 (&states)[warps][group];
  ac::ClusterParts<Plan::cluster, group, head_dim>& parts;
  bool* last;
};

// The rows of this block's KV head in the caches: row i begins at keys + i * pitch.
struct Cache {
  T* keys;
  T* values;
  long long pitch;
};

// Which part of the work a block has.
struct Block {
  int split;
  int splits;
  int kv_head;
};

__device__ __forceinline__ Cache cache_of(const Operands& operands, const Block& block) {
  Cache cache;
  cache.pitch = static_cast<long long>(operands.kv_heads) * head_dim;
  cache.keys = operands.k_cache + block.kv_head * head_dim;
  cache.values = operands.v_cache + block.kv_head * head_dim;
  return cache;
}

// The end of a block: merges the warps, then the splits, and writes this KV head's outputs.
__device__ __forceinline__ void merge(const Operands& operands, int kv_head, int active, const Buffers& buffers) {
  T* out_heads = operands.out + kv_head * group * head_dim;
  auto finish = [&](int i, float total, ac::SoftmaxState state) {
    if constexpr (Plan::has_sinks) {
      const float sink = ac::to_float(operands.sinks[kv_head * group + i / head_dim]) * log2_e;
      out_heads[i] = ac::from_float<T>(ac::softmax_divide_with_sink(total, state, sink));
    } else {
      out_heads[i] = ac::from_float<T>(ac::softmax_divide(total, state));
    }
  };
  ac::merge_attention<Plan::threads, warps, group, head_dim, Plan::cluster>(buffers.outputs, buffers.states, buffers.parts,
                                                                           operands.workspace, operands.counters + kv_head, active,
                                                                           buffers.last, finish);
}

}  // namespace
