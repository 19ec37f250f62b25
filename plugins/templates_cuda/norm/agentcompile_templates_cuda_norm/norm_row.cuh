// What the kernels of the family share: neighbouring elements of a row and their weights, held as they are stored until they are used.
//
// A load that is converted where it is made holds up its thread, and all loads behind it: those of `Held` are all on their way before
// the first is unpacked. A step is the elements of one 16-byte vector of rows; weights of other types take 8 or 32 bytes of it.
#pragma once
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/row.cuh>

namespace {

using T = Plan::T;
using Step = float[ac::Vec16<T>::size];
constexpr int step = ac::Vec16<T>::size;

// `whole` of a body that is compiled once for each value and has no branch on it: with a branch at every load and store a turn of
// norm_kept takes 325 instructions for rows of 256 halves, without 281 (sm_90a).
template <bool Value> struct Known {
  __device__ __forceinline__ constexpr operator bool() const { return Value; }
};

template <class Element> struct Held : ac::Vector<Element, step> {
  using Vector = ac::Vector<Element, step>;

  // The elements first .. first + step - 1 of a row, zero from `end` on. With `whole` all of them lie below `end` or none, and
  // row + first is aligned for them.
  static __device__ __forceinline__ Held load(const Element* row, int first, int end, bool whole) {
    if (!whole) return gather(first, end, [&](int i) { return ac::to_float(row[i]); });
    return Held{first < end ? Vector::load(row + first) : Vector::zero()};
  }

  // of(i) of the same elements, each a value of Element.
  template <class Of> static __device__ __forceinline__ Held gather(int first, int end, Of of) {
    Step values;
#pragma unroll
    for (int e = 0; e < step; ++e) values[e] = first + e < end ? of(first + e) : 0.0f;
    return Held{Vector::pack(values)};
  }
};

// Rounds a step to T, two elements by one instruction.
__device__ __forceinline__ void round_step(Step& values) { ac::Vector<T, step>::pack(values).unpack(values); }

// Weight and bias of a step, where the norm has them.
struct Weights {
  Held<Plan::W> scale;
  Held<Plan::W> shift;

  // Those of the elements first .. first + step - 1 below `end`; of channels one for `span` neighbours, from `channel` on.
  __device__ __forceinline__ void load(const Plan::W* weight, const Plan::W* bias, int first, int end, bool whole, int channel, int span) {
    if constexpr (Plan::channels) {
      if constexpr (Plan::has_weight) {
        scale = Held<Plan::W>::gather(first, end, [&](int i) { return ac::to_float(weight[channel + i / span]); });
      }
      if constexpr (Plan::has_bias) {
        shift = Held<Plan::W>::gather(first, end, [&](int i) { return ac::to_float(bias[channel + i / span]); });
      }
    } else {
      if constexpr (Plan::has_weight) scale = Held<Plan::W>::load(weight, first, end, whole);
      if constexpr (Plan::has_bias) shift = Held<Plan::W>::load(bias, first, end, whole);
    }
  }

  // Normalizes a step in place, rounded to T; without Round not, where it is stored as it is, which rounds it.
  template <bool Round = true> __device__ __forceinline__ void normalize(Step& values, ac::RowStatistics statistics) const {
    Step scales, shifts;
    if constexpr (Plan::has_weight) scale.unpack(scales);
    if constexpr (Plan::has_bias) shift.unpack(shifts);
#pragma unroll
    for (int e = 0; e < step; ++e) {
      const float weight = Plan::has_weight ? scales[e] : 1.0f;
      const float bias = Plan::has_bias ? shifts[e] : 0.0f;
      values[e] = Round ? ac::normalize<Plan::norm, T>(values[e], statistics, weight, bias)
                        : ac::normalize_unrounded<Plan::norm, T>(values[e], statistics, weight, bias);
    }
  }
};

// The elements of a step that lie below `end` to where they belong; `whole` as of Held::load.
__device__ __forceinline__ void store_step(const Step& values, T* row, int first, int end, bool whole) {
  if (whole) {
    if (first < end) ac::Vector<T, step>::pack(values).store(row + first);
  } else {
#pragma unroll
    for (int e = 0; e < step; ++e) {
      if (first + e < end) row[first + e] = ac::from_float<T>(values[e]);
    }
  }
}

// The first channel of a row, where each of `groups` rows has other ones.
__device__ __forceinline__ int first_channel(int row, int groups, int columns, int span) {
  return Plan::channels ? row % groups * (columns / span) : 0;
}

// x + residual, rounded to T: what a norm with a residual is of.
__device__ __forceinline__ void add_rounded(Step& values, const Held<T>& residual) {
  Step added;
  residual.unpack(added);
#pragma unroll
  for (int e = 0; e < step; ++e) values[e] += added[e];
  round_step(values);
}

// Whether all of these may be used with 16-byte vectors; an absent operand is null, which may.
template <class... Pointers> __device__ __forceinline__ bool all_aligned(Pointers... pointers) {
  return ((... | reinterpret_cast<unsigned long long>(pointers)) & 15u) == 0;  // no branch between them
}

}  // namespace
