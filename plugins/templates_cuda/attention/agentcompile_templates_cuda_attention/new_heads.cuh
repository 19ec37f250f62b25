// The new token's heads, prepared once per block: q/k RMS norm, RoPE, into shared memory.
#pragma once
#include "decode_attention.cuh"

namespace {

using Vector = ac::Vec16<T>;
constexpr int prepare_lanes = head_dim <= 4 * Vector::size    ? 4
                              : head_dim <= 8 * Vector::size  ? 8
                              : head_dim <= 16 * Vector::size ? 16
                                                              : 32;
using PreparedHead = ac::Head<T, head_dim, prepare_lanes>;
using PreparedValue = ac::Head<T, value_dim, prepare_lanes>;

// The heads of this token, ready for use, in shared memory: the block's query heads after norm and RoPE, the new key
// likewise, the new value. A lane group prepares one head; `fetch` only issues loads, `finish` ends with a barrier.
//
// CopiesValue: the value is copied by cp.async, where the block has no other copies on their way. Where registers are short the compiler
// puts a load into registers off until the others have come, and the barrier waits for the memory twice.
template <bool CopiesValue> struct NewHeads {
  static constexpr int groups = Plan::threads / prepare_lanes;
  static constexpr int rounds = (group + 1 + groups - 1) / groups;  // the key is number `group`
  static constexpr int rotary_vectors = Plan::rotary_dim / Vector::size;
  PreparedHead::Packed head[rounds], cosine, sine, weight[rounds];
  PreparedValue::Packed value;

  static __device__ __forceinline__ int number(int round) { return round * groups + threadIdx.x / prepare_lanes; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % prepare_lanes; }

  __device__ __forceinline__ void fetch_weights(const T* q_norm, const T* k_norm) {
    if constexpr (Plan::qk_norm != ac::norm_none) {
#pragma unroll
      for (int r = 0; r < rounds; ++r) PreparedHead::load(weight[r], number(r) < group ? q_norm : k_norm, lane());
    }
  }

  __device__ __forceinline__ void fetch(const T* q, const T* k, const T* v, const T* cos, const T* sin, const Share& share,
                                        Vector (&values)[PreparedValue::head_vectors]) {
    if constexpr (CopiesValue) {
#pragma unroll
      for (int j = 0; j < PreparedValue::vectors; ++j) {
        const int vector = lane() + j * prepare_lanes;
        if (number(rounds - 1) != group || !PreparedValue::inside(vector)) continue;
        ac::cp_async16(values + vector, v + share.kv_head * value_dim + vector * Vector::size);
      }
      ac::cp_async_commit();
    }
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      const T* source = number(r) < group ? q + (share.first_head() + number(r)) * head_dim : k + share.kv_head * head_dim;
      PreparedHead::load(head[r], source, lane(), number(r) <= group);
    }
    if constexpr (!CopiesValue) PreparedValue::load(value, v + share.kv_head * value_dim, lane(), number(rounds - 1) == group);
    if constexpr (Plan::rotary_dim > 0) {
      PreparedHead::load(cosine, cos, lane(), true, rotary_vectors);
      PreparedHead::load(sine, sin, lane(), true, rotary_vectors);
    }
  }

  __device__ __forceinline__ void finish(Vector (&queries)[group][PreparedHead::head_vectors], Vector (&key)[PreparedHead::head_vectors],
                                         Vector (&values)[PreparedValue::head_vectors], float eps) {
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      PreparedHead::Slice slice;
      PreparedHead::unpack(head[r], slice);
      PreparedHead::norm<Plan::qk_norm>(slice, weight[r], eps);
      PreparedHead::rotate<Plan::rotary_dim, Plan::interleaved>(slice, cosine, sine, lane());
      PreparedHead::pack(slice, head[r]);
      if (number(r) <= group) place<PreparedHead>(head[r], number(r) < group ? queries[number(r)] : key);
    }
    if constexpr (!CopiesValue) {
      if (number(rounds - 1) == group) place<PreparedValue>(value, values);
    }
    drain();
    __syncthreads();
  }

  // Nothing that `fetch` asked for is on its way to shared memory any more.
  __device__ __forceinline__ void drain() const {
    if constexpr (CopiesValue) ac::cp_async_wait<0>();
  }

  template <class Prepared> static __device__ __forceinline__ void place(const typename Prepared::Packed& packed, Vector* head) {
#pragma unroll
    for (int j = 0; j < Prepared::vectors; ++j) {
      const int vector = lane() + j * prepare_lanes;
      if (Prepared::inside(vector)) head[vector] = packed[j];
    }
  }
};

}  // namespace
