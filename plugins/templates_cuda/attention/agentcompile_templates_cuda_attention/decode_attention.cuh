// What both decode attention kernels share: operands, the shared memory of the merge, and the end of a block.
//
// Layouts: q [query heads * D]; out the same with V's width Dv; k [kv_heads * D]; v [kv_heads * Dv]; caches [capacity,
// kv_heads, D or Dv]; cos, sin [rotary_dim];
// position: the index of the token being decoded, so the length is position + 1. Grid (splits, kv_heads, parts).
//
// Parts: where a KV head has more query heads than one block holds, they are dealt to Plan::parts blocks of `group` each (see
// Share). Each part reads the KV head's rows, the second and later ones from L2, and merges its splits by itself. None waits for
// or reads what another one writes: each computes the new key anew, takes the new row from its registers or shared memory, and
// skips it in the cache; only part 0 appends it.
#pragma once
#include <agentcompile/head.cuh>
#include <agentcompile/split.cuh>
#include "plan.cuh"

namespace {

using T = Plan::T;
constexpr int head_dim = Plan::head_dim;    // of Q and K
constexpr int value_dim = Plan::value_dim;  // of V and the output
constexpr int group = Plan::group;    // query heads of a block: those of a KV head, or of one part of them
constexpr int unroll = Plan::unroll;  // positions (lanes) or 16-position steps (tensor) in flight
constexpr int warps = Plan::threads / ac::warp_size;
constexpr int kv_heads = Plan::kv_heads;
constexpr long long key_row = static_cast<long long>(kv_heads) * head_dim;  // elements from one cached position to the next
constexpr long long value_row = static_cast<long long>(kv_heads) * value_dim;
constexpr float log2_e = 1.4426950408889634f;

// What a block serves: `group` query heads of one KV head. Where the heads of a KV head do not fill its parts, the last part
// begins early and computes its first `overlap` heads for nothing; they are its neighbour's to write.
struct Share {
  static constexpr int overlap = Plan::parts * group - Plan::kv_group;
  static_assert(0 <= overlap && overlap < group, "every query head is in a part, and every part has a head of its own");
  int kv_head;

  static __device__ __forceinline__ int part() { return Plan::parts > 1 ? blockIdx.z : 0; }
  static __device__ __forceinline__ bool appends() { return part() == 0; }  // the new row of K and V, if its tile holds it
  static __device__ __forceinline__ int repeated() { return part() == Plan::parts - 1 ? overlap : 0; }
  __device__ __forceinline__ int first_head() const {  // among all query heads
    if constexpr (Plan::parts == 1) return kv_head * group;
    return kv_head * Plan::kv_group + part() * group - repeated();
  }
};

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
  int capacity;
  float scale;
  float norm_eps;
  int window;
  float softcap;
};

// Splits of a KV head: those of a cluster are known where the kernel is compiled, so that nothing is divided by their number.
__device__ __forceinline__ int split_count() { return Plan::cluster > 0 ? Plan::cluster : gridDim.x; }

template <bool Messages> struct PartsOf { using Type = ac::ClusterParts<Plan::cluster, group, value_dim>; };
template <> struct PartsOf<true> { using Type = ac::MessageParts<Plan::cluster, group, value_dim>; };
using Parts = PartsOf<Plan::messages>::Type;

// The outputs of each warp, one behind the other.
struct WarpOutputs {
  float (&memory)[warps][group * value_dim];
  __device__ __forceinline__ float of(int warp, unsigned i) const { return memory[warp][i]; }
  __device__ __forceinline__ float* team(int number) const { return memory[number]; }
};

// The shared memory that the merge works in, beside the outputs of each warp.
struct Buffers {
  float2 (&states)[warps][group];
  Parts& parts;
  bool* last;
};

// The end of a block: merges the warps, then the splits, and writes the outputs of this block's heads. `outputs`: see ac::merge_splits.
template <class Outputs>
__device__ __forceinline__ void merge(const Operands& operands, const Share& share, int active, const Outputs& outputs,
                                      const Buffers& buffers) {
  T* out_heads = operands.out + share.first_head() * value_dim;
  auto finish = [&](unsigned i, float total, ac::SoftmaxState state) {
    if constexpr (Share::overlap > 0) {
      if (i / value_dim < share.repeated()) return;
    }
    if constexpr (Plan::has_sinks) {
      const float sink = ac::to_float(operands.sinks[share.first_head() + i / value_dim]) * log2_e;
      out_heads[i] = ac::from_float<T>(ac::softmax_divide_with_sink(total, state, sink));
    } else {
      out_heads[i] = ac::from_float<T>(ac::softmax_divide(total, state));
    }
  };
  const ac::SplitMemory memory{operands.workspace, operands.counters, share.part() * kv_heads + share.kv_head, Plan::parts * kv_heads};
  ac::merge_attention<Plan::threads, warps, group, value_dim>(outputs, buffers.states, buffers.parts, memory, active, buffers.last, finish);
}

}  // namespace
