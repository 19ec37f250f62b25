// The inputs of a pointwise expression that other kernels evaluate on the way: element i of the expression reads element i
// of a full input, element i % period of one that repeats along the leading axes, and the one element of a scalar.
//
// `load` brings Step neighbouring elements with 16-byte loads; `element` brings one. Both write column j of `values` for
// input j; columns of absent inputs are not read by the expression. `fetch` issues the loads alone and `evaluate` takes what
// they bring: who fetches several steps before he evaluates the first has all their loads on the way at once. Who fetches
// reads once, and says whether full inputs leave L1 alone (PastL1): where all are few bytes, up to 12 MiB, rows were 1 to 23 %
// faster so, from 24 MiB on 2 to 5 % slower (H200, docs/performance.md).
#pragma once
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>

namespace ac {

constexpr int input_full = 0;
constexpr int input_repeats = 1;
constexpr int input_scalar = 2;
constexpr int input_absent = 3;

template <int Kind, class A> struct Input {
  static constexpr bool full = Kind == input_full;
  const A* address;
  long long period;

  // Whether `load<Step>` may be used at every multiple of Step.
  template <int Step> __device__ __forceinline__ bool in_vectors() const {
    if constexpr (full) return is_aligned16(address);
    if constexpr (Kind == input_repeats) return is_aligned16(address) && period % Step == 0;
    return true;
  }

  __device__ __forceinline__ long long place(long long index) const {
    return full ? index : Kind == input_repeats ? index % period : 0;
  }

  // Step neighbouring elements as they lie in memory; of inputs of one element, and of absent ones, nothing.
  template <int Step> struct Step16 {
    Vec16<A> parts[full || Kind == input_repeats ? Step / Vec16<A>::size : 1];
  };

  template <bool PastL1, int Step> __device__ __forceinline__ void fetch(long long first, Step16<Step>& step) const {
    if constexpr (full || Kind == input_repeats) {
      constexpr int size = Vec16<A>::size;
      static_assert(Step % size == 0, "a step is a whole number of vectors of every input");
      const A* start = address + place(first);
#pragma unroll
      for (int part = 0; part < Step / size; ++part) {
        step.parts[part] = PastL1 && full ? Vec16<A>{load_stream16(start + part * size)} : Vec16<A>::load(start + part * size);
      }
    }
  }

  template <int Step> __device__ __forceinline__ void unpack(const Step16<Step>& step, float (&values)[Step][3], int j) const {
    if constexpr (Kind == input_scalar) {
      const float value = to_float(*address);
#pragma unroll
      for (int e = 0; e < Step; ++e) values[e][j] = value;
    } else if constexpr (Kind != input_absent) {
      constexpr int size = Vec16<A>::size;
#pragma unroll
      for (int part = 0; part < Step / size; ++part) {
        float some[size];
        step.parts[part].unpack(some);
#pragma unroll
        for (int e = 0; e < size; ++e) values[part * size + e][j] = some[e];
      }
    }
  }

  __device__ __forceinline__ void element(long long index, float& value) const {
    if constexpr (Kind != input_absent) value = to_float(address[place(index)]);
  }

  template <int Step, int Count> __device__ __forceinline__ void load(long long first, float (&values)[Step][Count], int j) const {
    if constexpr (Kind == input_scalar) {
      const float value = to_float(*address);
#pragma unroll
      for (int e = 0; e < Step; ++e) values[e][j] = value;
    } else if constexpr (Kind != input_absent) {
      constexpr int size = Vec16<A>::size;
      static_assert(Step % size == 0, "a step is a whole number of vectors of every input");
      const A* start = address + place(first);
#pragma unroll
      for (int part = 0; part < Step / size; ++part) {
        float some[size];
        Vec16<A>::load(start + part * size).unpack(some);
#pragma unroll
        for (int e = 0; e < size; ++e) values[part * size + e][j] = some[e];
      }
    }
  }
};

// Up to three inputs of the expression `Apply::apply(const float*)`.
template <class Apply, class In0, class In1, class In2> struct Inputs {
  In0 in0;
  In1 in1;
  In2 in2;

  template <int Step> __device__ __forceinline__ bool in_vectors() const {
    return in0.template in_vectors<Step>() && in1.template in_vectors<Step>() && in2.template in_vectors<Step>();
  }

  __device__ __forceinline__ float element(long long index) const {
    float values[3] = {};
    in0.element(index, values[0]);
    in1.element(index, values[1]);
    in2.element(index, values[2]);
    return Apply::apply(values);
  }

  template <int Step> __device__ __forceinline__ void load(long long first, float (&results)[Step]) const {
    float values[Step][3] = {};
    in0.load(first, values, 0);
    in1.load(first, values, 1);
    in2.load(first, values, 2);
#pragma unroll
    for (int e = 0; e < Step; ++e) results[e] = Apply::apply(values[e]);
  }

  // Step neighbouring elements of every input, on their way or there.
  template <int Step> struct Fetched {
    typename In0::template Step16<Step> in0;
    typename In1::template Step16<Step> in1;
    typename In2::template Step16<Step> in2;
  };

  // `first` is a multiple of Step; only where in_vectors<Step>().
  template <bool PastL1, int Step> __device__ __forceinline__ void fetch(long long first, Fetched<Step>& step) const {
    in0.template fetch<PastL1>(first, step.in0);
    in1.template fetch<PastL1>(first, step.in1);
    in2.template fetch<PastL1>(first, step.in2);
  }

  template <int Step> __device__ __forceinline__ void evaluate(const Fetched<Step>& step, float (&results)[Step]) const {
    float values[Step][3] = {};
    in0.unpack(step.in0, values, 0);
    in1.unpack(step.in1, values, 1);
    in2.unpack(step.in2, values, 2);
#pragma unroll
    for (int e = 0; e < Step; ++e) results[e] = Apply::apply(values[e]);
  }

  // Elements first .. first + Step - 1 as far as they lie below `end`, and `rest` behind it. With `vectors` a step is whole
  // or empty, and first is a multiple of Step.
  template <int Step>
  __device__ __forceinline__ void load_below(long long first, long long end, float rest, bool vectors, float (&results)[Step]) const {
    if constexpr (Step > 1) {
      if (vectors && first < end) {
        load(first, results);
        return;
      }
    }
#pragma unroll
    for (int e = 0; e < Step; ++e) results[e] = first + e < end ? element(first + e) : rest;
  }
};

// The same elements to where they belong.
template <class T, int Step>
__device__ __forceinline__ void store_below(const float (&results)[Step], T* out, long long first, long long end, bool vectors) {
  if (vectors) {
    constexpr int size = Vec16<T>::size;
    static_assert(Step % size == 0, "a step is a whole number of vectors of the output");
    if (first >= end) return;
#pragma unroll
    for (int part = 0; part < Step / size; ++part) {
      float some[size];
#pragma unroll
      for (int e = 0; e < size; ++e) some[e] = results[part * size + e];
      Vec16<T>::pack(some).store(out + first + part * size);
    }
  } else {
#pragma unroll
    for (int e = 0; e < Step; ++e) {
      if (first + e < end) out[first + e] = from_float<T>(results[e]);
    }
  }
}

}  // namespace ac
