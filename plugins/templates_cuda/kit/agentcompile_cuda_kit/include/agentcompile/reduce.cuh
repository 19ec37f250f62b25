// Reductions over a warp and over a block. All orders are fixed, so results are bit-identical from run to run.
//
// Block reductions take scratch in shared memory (one entry per warp) and a barrier functor, because in some kernels only
// a part of the block takes part (a producer warp runs beside it). Every participating thread gets the result, and the
// scratch may be reused right after the call, where it does not say otherwise.
#pragma once

namespace ac {

constexpr unsigned int full_warp = 0xffffffffu;
constexpr int warp_size = 32;

// Sum over `Width` neighbouring lanes (a power of two); every lane gets the result.
template <int Width = warp_size> __device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = Width / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(full_warp, value, offset);
  return value;
}

// Maximum over `Width` neighbouring lanes; a NaN is ignored unless all are NaN (fmaxf).
template <int Width = warp_size> __device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = Width / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(full_warp, value, offset));
  }
  return value;
}

// The barrier of a whole block.
struct BlockBarrier {
  __device__ __forceinline__ void operator()() const { __syncthreads(); }
};

// Sum over `Warps` whole warps, of which this thread's is number `warp`. `scratch`: Warps floats in shared memory. `Last`: another barrier
// stands between this sum and whatever is written to the scratch next, so that none has to end it.
template <int Warps, bool Last = false, class Barrier = BlockBarrier>
__device__ __forceinline__ float block_sum(float value, float* scratch, int warp, int lane, Barrier barrier = {}) {
  value = warp_sum(value);
  if constexpr (Warps == 1) return value;
  if (lane == 0) scratch[warp] = value;
  barrier();
  float total = 0.0f;
#pragma unroll
  for (int other = 0; other < Warps; ++other) total += scratch[other];
  if constexpr (!Last) {
    barrier();
  }
  return total;
}

// (value, index) reduction for argmax: the largest value, the smallest index among equals; NaN counts as the maximum, as
// in torch. The order is total, so any reduction tree gives the same answer.
struct ValueIndex {
  float value;
  int index;
};

__device__ __forceinline__ bool is_nan(float value) { return value != value; }

__device__ __forceinline__ bool precedes(ValueIndex a, ValueIndex b) {
  const bool a_nan = is_nan(a.value);
  const bool b_nan = is_nan(b.value);
  if (a_nan != b_nan) return a_nan;
  if (!a_nan && a.value != b.value) return a.value > b.value;
  return a.index < b.index;
}

__device__ __forceinline__ ValueIndex first_maximum(ValueIndex a, ValueIndex b) { return precedes(b, a) ? b : a; }

// A number that is larger where a value precedes by its size: NaN above all, zeros alike. No value has the key 0.
__device__ __forceinline__ unsigned int order_key(float value) {
  const int bits = __float_as_int(value + 0.0f);  // -0 becomes +0
  return is_nan(value) ? 0xffffffffu : static_cast<unsigned int>(bits ^ (bits >> 31 | static_cast<int>(0x80000000u)));
}

// The key and index of a warp's first maximum, from those of its lanes (redux: one instruction where shuffles take five rounds).
struct KeyIndex {
  unsigned int key;
  int index;
};

__device__ __forceinline__ KeyIndex warp_first_maximum(KeyIndex mine) {
  const unsigned int key = __reduce_max_sync(full_warp, mine.key);
  return KeyIndex{key, __reduce_min_sync(full_warp, mine.key == key ? mine.index : 0x7fffffff)};
}

__device__ __forceinline__ ValueIndex warp_first_maximum(ValueIndex mine) {
  const KeyIndex own{order_key(mine.value), mine.index};
  const KeyIndex best = warp_first_maximum(own);
  const unsigned int holders = __ballot_sync(full_warp, own.key == best.key && own.index == best.index);
  return ValueIndex{__shfl_sync(full_warp, mine.value, __ffs(holders) - 1), best.index};
}

// `values`, `indices`: one entry per warp in shared memory.
template <int Warps, class Barrier = BlockBarrier>
__device__ __forceinline__ ValueIndex block_first_maximum(ValueIndex best, float* values, int* indices, int warp,
                                                          int lane, Barrier barrier = {}) {
  best = warp_first_maximum(best);
  if constexpr (Warps == 1) return best;
  if (lane == 0) {
    values[warp] = best.value;
    indices[warp] = best.index;
  }
  barrier();
  best = ValueIndex{values[0], indices[0]};
#pragma unroll
  for (int other = 1; other < Warps; ++other) best = first_maximum(best, ValueIndex{values[other], indices[other]});
  barrier();
  return best;
}

}  // namespace ac
