// What the three launches of draw.cu share: scores and their keys, what is found on the way, the elements of a block, and sums and maxima
// over a warp and a block.
#pragma once
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>
#include <agentcompile/split.cuh>

#include "plan.cuh"

namespace {

using T = Plan::T;
using Vector = ac::Vec16<T>;
constexpr int keys = 65536;
constexpr int row_keys = ac::warp_size;
constexpr int rows = keys / row_keys;
constexpr int rows_each = rows / Plan::threads;                     // that a thread of the last block holds
constexpr int warps = Plan::threads / ac::warp_size;
constexpr int rows_of_warp = rows / (Plan::row_blocks * warps);     // that a warp adds up
constexpr int block_elements = Plan::threads * Vector::size;        // neighbours in the vocabulary that a block looks at
constexpr int all_of_them = 0x7fffffff;
static_assert(rows % Plan::threads == 0 && rows % (Plan::row_blocks * warps) == 0, "rows are dealt out evenly");

union Bits {
  T value;
  unsigned short bits;
  __device__ Bits() {}
};

// What is found on the way; all of it is zero before a draw.
struct Tally {
  unsigned int bounded;  // blocks of draw_bounds, and of draw_pick, that have ended
  unsigned int picked;
  int above_largest;     // the largest key + 1
  int no_number;         // 1: a NaN or plus infinity
  int likely_below;      // keys - the smallest key that is likely enough for min-p
};

struct Bounds {
  int key;     // the smallest that is kept
  int kept;    // so many of its elements, the last ones; all_of_them: every one
  float most;  // the score of the likeliest
  float mass;  // the probability of all that is kept (times the likeliest's)
};

// What a block of draw_pick found: the best candidate among those that are kept in any case, and among the elements of the smallest
// key that is kept, if they are kept in part; how many these are.
struct Part {
  unsigned long long sure;
  unsigned long long edge;
  int count;
  int unused;
};

// Rises with the value; both zeros have one key. NaNs lie beyond the keys of the infinities.
__device__ __forceinline__ int key_of(T value) {
  Bits given;
  given.value = value;
  const int bits = given.bits == 0x8000u ? 0 : given.bits;
  return bits & 0x8000 ? 0xffff ^ bits : bits | 0x8000;
}

__device__ __forceinline__ float value_of(int key) {
  Bits made;
  made.bits = static_cast<unsigned short>(key & 0x8000 ? key ^ 0x8000 : 0xffff ^ key);
  return ac::to_float(made.value);
}

__device__ __forceinline__ float chance(float score, float most) { return expf(score - most); }

// The element `e` of this thread's in the block number `block`, of which `group` is the thread's place from the first element on.
__device__ __forceinline__ int index_of(int block, int group, int e) { return block * block_elements + group * Vector::size + e; }

// This thread's neighbours, minus infinity behind the last one.
__device__ __forceinline__ void load_elements(const T* logits, int n, int block, int group, T (&elements)[Vector::size]) {
  const int first = index_of(block, group, 0);
  if (first + Vector::size <= n && ac::is_aligned16(logits)) {
    const Vector vector = Vector::load(logits + first);
#pragma unroll
    for (int e = 0; e < Vector::size; ++e) elements[e] = reinterpret_cast<const T*>(&vector)[e];
  } else {
#pragma unroll
    for (int e = 0; e < Vector::size; ++e) {
      elements[e] = first + e < n ? logits[first + e] : ac::from_float<T>(__int_as_float(static_cast<int>(0xff800000u)));
    }
  }
}

template <class Value> __device__ __forceinline__ Value sum_of_warp(Value value) {
#pragma unroll
  for (int offset = ac::warp_size / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(ac::full_warp, value, offset);
  return value;
}

template <class Value> __device__ __forceinline__ Value larger(Value a, Value b) { return a > b ? a : b; }

// The largest value of the block, in its thread 0. `scratch`: one entry per warp.
template <class Value> __device__ __forceinline__ Value largest_of_block(Value mine, Value* scratch) {
#pragma unroll
  for (int offset = ac::warp_size / 2; offset > 0; offset /= 2) mine = larger(mine, __shfl_xor_sync(ac::full_warp, mine, offset));
  if (threadIdx.x % ac::warp_size == 0) scratch[threadIdx.x / ac::warp_size] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int other = 1; other < warps; ++other) mine = larger(mine, scratch[other]);
  }
  __syncthreads();
  return mine;
}

// What this lane and those before it hold together.
template <class Value> __device__ __forceinline__ Value sum_up_to(Value mine, int lane) {
#pragma unroll
  for (int offset = 1; offset < ac::warp_size; offset *= 2) {
    const Value other = __shfl_up_sync(ac::full_warp, mine, offset);
    if (lane >= offset) mine += other;
  }
  return mine;
}

// What the threads before this one hold together, and all of them. `scratch`: one entry per warp; free again afterwards.
template <class Value> __device__ __forceinline__ Value sum_before(Value mine, Value* scratch, Value& total) {
  const int warp = threadIdx.x / ac::warp_size, lane = threadIdx.x % ac::warp_size;
  const Value up_to = sum_up_to(mine, lane);
  if (lane == ac::warp_size - 1) scratch[warp] = up_to;
  __syncthreads();
  Value before = __shfl_up_sync(ac::full_warp, up_to, 1);
  if (lane == 0) before = Value(0);
  Value earlier = Value(0), all = Value(0);
#pragma unroll
  for (int other = 0; other < warps; ++other) {
    if (other == warp) earlier = all;
    all += scratch[other];
  }
  __syncthreads();
  total = all;
  return earlier + before;
}

// A number that is larger where the ratio is, and, of equal ratios, the index smaller; 0: no candidate.
__device__ __forceinline__ unsigned long long candidate_of(float ratio, int index) {
  if (!(ratio >= 0.0f)) return 0;
  const unsigned int bits = static_cast<unsigned int>(__float_as_int(ratio));
  return static_cast<unsigned long long>(bits) << 32 | (0xffffffffu - static_cast<unsigned int>(index));
}

__device__ __forceinline__ unsigned long long candidate(const Bounds& given, T score, float scale, const float* clocks, int index) {
  return candidate_of(chance(ac::to_float(score) * scale, given.most) / given.mass / clocks[index], index);
}

}  // namespace
