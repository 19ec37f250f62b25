// What a reduction carries along, and how two of them become one. All in fp32; every order of merging is fixed by the kernel.
//
// A State has: nothing(), what no element at all gives; add(values, index, valid, apart), the first `valid` of elements that lie
// `apart` from each other, of which the first is number `index`; merge(other), of what lies behind or elsewhere; words that go
// through a workspace.
#pragma once
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>

namespace reduction {

enum Operation : int { sum, largest, smallest, product, sum_of_magnitudes, sum_of_squares, variance, first_largest, first_smallest, log_of_exponentials };

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Sums, products and extremes: one number. An extreme is NaN where any element is.
template <int Op> struct Single {
  static constexpr int words = 1;
  float value;

  static __device__ __forceinline__ Single nothing() {
    return Single{Op == largest ? -infinity() : Op == smallest ? infinity() : Op == product ? 1.0f : 0.0f};
  }

  __device__ __forceinline__ void take(float other) {
    if constexpr (Op == largest) {
      value = ac::greater_or_nan(value, other);
    } else if constexpr (Op == smallest) {
      value = ac::smaller_or_nan(value, other);
    } else if constexpr (Op == product) {
      value *= other;
    } else {
      value += other;
    }
  }

  // In pairs, pairs of pairs and so on: no addition waits for more than log2(Step) others.
  template <int Step> __device__ __forceinline__ void add(const float (&values)[Step], int, int valid, int = 1) {
    Single some[Step];
#pragma unroll
    for (int e = 0; e < Step; ++e) {
      some[e] = nothing();
      if (e < valid) some[e].value = Op == sum_of_magnitudes ? fabsf(values[e]) : Op == sum_of_squares ? values[e] * values[e] : values[e];
    }
#pragma unroll
    for (int offset = Step / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int e = 0; e < offset; ++e) some[e].take(some[e + offset].value);
    }
    take(some[0].value);
  }

  __device__ __forceinline__ void merge(const Single& other) { take(other.value); }
  __device__ __forceinline__ float word(int) const { return value; }
  __device__ __forceinline__ void set_word(int, float bits) { value = bits; }
};

// Mean and sum of squared distances from it; groups are merged by their means, so that large means cost no precision.
struct Moments {
  static constexpr int words = 3;
  float mean;
  float squares;
  float count;

  static __device__ __forceinline__ Moments nothing() { return Moments{0.0f, 0.0f, 0.0f}; }

  template <int Step> __device__ __forceinline__ void add(const float (&values)[Step], int, int valid, int = 1) {
    if (valid <= 0) return;
    Moments group{0.0f, 0.0f, static_cast<float>(min(valid, Step))};
    const float origin = values[0];  // distances from it are small where the elements are alike
#pragma unroll
    for (int e = 1; e < Step; ++e) {
      if (e < valid) group.mean += values[e] - origin;
    }
    group.mean = origin + group.mean / group.count;
#pragma unroll
    for (int e = 0; e < Step; ++e) {
      const float distance = values[e] - group.mean;
      if (e < valid) group.squares = fmaf(distance, distance, group.squares);
    }
    merge(group);
  }

  __device__ __forceinline__ void merge(const Moments& other) {
    if (other.count == 0.0f) return;
    const float total = count + other.count;
    const float distance = other.mean - mean;
    const float share = other.count / total;
    mean = fmaf(distance, share, mean);
    squares += fmaf(distance * distance, count * share, other.squares);
    count = total;
  }

  __device__ __forceinline__ float word(int index) const { return index == 0 ? mean : index == 1 ? squares : count; }
  __device__ __forceinline__ void set_word(int index, float bits) { (index == 0 ? mean : index == 1 ? squares : count) = bits; }
};

// The first place of an extreme and its value, NaN before all numbers. The smallest is the largest of the negated elements.
template <bool Smallest> struct Place {
  static constexpr int words = 2;
  ac::ValueIndex best;

  static __device__ __forceinline__ Place nothing() { return Place{ac::ValueIndex{-infinity(), 0x7fffffff}}; }

  template <int Step> __device__ __forceinline__ void add(const float (&values)[Step], int index, int valid, int apart = 1) {
#pragma unroll
    for (int e = 0; e < Step; ++e) {
      if (e < valid) best = ac::first_maximum(best, ac::ValueIndex{Smallest ? -values[e] : values[e], index + e * apart});
    }
  }

  __device__ __forceinline__ void merge(const Place& other) { best = ac::first_maximum(best, other.best); }
  __device__ __forceinline__ float value() const { return Smallest ? -best.value : best.value; }
  __device__ __forceinline__ float word(int index) const { return index == 0 ? best.value : __int_as_float(best.index); }
  __device__ __forceinline__ void set_word(int index, float bits) {
    if (index == 0) best.value = bits;
    else best.index = __float_as_int(bits);
  }
};

// The largest element and the sum of exp(element - largest). The largest starts at the lowest finite number, so that nothing but -inf
// has a sum of zero, whose logarithm is -inf; beside an infinity all others are nothing, and a NaN makes the sum one.
struct Exponentials {
  static constexpr int words = 2;
  float largest;
  float sum;

  static __device__ __forceinline__ Exponentials nothing() { return Exponentials{-3.402823466e38f, 0.0f}; }

  // exp(value - above) where an infinity is as far above as itself.
  static __device__ __forceinline__ float share(float value, float above) { return value == above ? 1.0f : expf(value - above); }

  template <int Step> __device__ __forceinline__ void add(const float (&values)[Step], int, int valid, int = 1) {
    float above = largest;
#pragma unroll
    for (int e = 0; e < Step; ++e) {
      if (e < valid) above = fmaxf(above, values[e]);
    }
    sum *= share(largest, above);
    largest = above;
#pragma unroll
    for (int e = 0; e < Step; ++e) {
      if (e < valid) sum += share(values[e], above);
    }
  }

  __device__ __forceinline__ void merge(const Exponentials& other) {
    const float above = fmaxf(largest, other.largest);
    sum = sum * share(largest, above) + other.sum * share(other.largest, above);
    largest = above;
  }

  __device__ __forceinline__ float word(int index) const { return index == 0 ? largest : sum; }
  __device__ __forceinline__ void set_word(int index, float bits) { (index == 0 ? largest : sum) = bits; }
};

template <int Op> struct StateOf { using type = Single<Op>; };
template <> struct StateOf<variance> { using type = Moments; };
template <> struct StateOf<first_largest> { using type = Place<false>; };
template <> struct StateOf<first_smallest> { using type = Place<true>; };
template <> struct StateOf<log_of_exponentials> { using type = Exponentials; };

// Of groups of Width neighbouring lanes of a warp; the first lane of each has the result.
template <int Width = ac::warp_size, class State> __device__ __forceinline__ State merge_warp(State state) {
#pragma unroll
  for (int offset = 1; offset < Width; offset *= 2) {
    State other;
#pragma unroll
    for (int i = 0; i < State::words; ++i) other.set_word(i, __shfl_down_sync(ac::full_warp, state.word(i), offset));
    state.merge(other);
  }
  return state;
}

// Of all `states`, by one thread in the order of merge_warp, so that both give the same bits; quicker where a state is one number.
template <class State, int Count> __device__ __forceinline__ State merge_in_pairs(const State (&states)[Count]) {
  State some[Count];
#pragma unroll
  for (int i = 0; i < Count; ++i) some[i] = states[i];
#pragma unroll
  for (int offset = 1; offset < Count; offset *= 2) {
#pragma unroll
    for (int i = 0; i + offset < Count; i += 2 * offset) some[i].merge(some[i + offset]);
  }
  return some[0];
}

}  // namespace reduction
