// Pointwise expression over up to six inputs: out[i] = Epilogue::apply({in0[i], in1[i], ...}), computed in fp32.
//
// An input is as large as out (Plan::broadcast_j = 0), one row of `columns` elements that repeats (1), one element (2), one of `extent_j`
// elements per channel, of which `inner` neighbours of out are (4), or it repeats along a middle axis (5): `inner` of its elements belong
// to every `extent_j` of out; absent inputs are null. out [count]; it may alias a full input. A thread owns Plan::step neighbouring
// elements: of what lies side by side one vector of 4, 8 or 16 bytes, or several of 16, where the addresses allow it. All loads of a thread
// are on their way before the first is used, past L1 where inputs are few bytes (Plan::past_l1). Plan::columns is 0 or `columns`; with
// Plan::even every thread of every block has Plan::step elements.
// Wins where a pointwise chain stands between operators that no other family fuses.
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include "plan.cuh"

namespace {

constexpr int step = Plan::step;
enum Broadcast : int { full = 0, row = 1, scalar = 2, absent = 3, channel = 4, middle = 5 };
using Index = Plan::Index;  // 32 bits where they count all elements: a remainder of 64 bits takes a hundred instructions

struct Sizes {
  Index count, columns, inner;
};

// Whether the elements of a step lie side by side in an input, as far as its kind says.
template <int Kind>
constexpr bool side_by_side = step > 1 && (Kind == full || (Kind == row && Plan::columns > 0 && Plan::columns % step == 0));

// The bits of an address that must be 0 for vectors of what lies there.
template <class A> __device__ __forceinline__ unsigned long long unaligned(const A* address) {
  constexpr int bytes = step * static_cast<int>(sizeof(A));
  return reinterpret_cast<unsigned long long>(address) & ((bytes < 16 ? bytes : 16) - 1);
}
template <int Kind, class A> __device__ __forceinline__ unsigned long long unaligned(const A* input) {
  return side_by_side<Kind> ? unaligned(input) : 0u;
}

template <int Kind> __device__ __forceinline__ Index place_of(Index i, const Sizes& sizes, Index extent) {
  return Kind == scalar    ? 0
         : Kind == row     ? i % sizes.columns
         : Kind == channel ? i / sizes.inner % extent
         : Kind == middle  ? i / extent * sizes.inner + i % sizes.inner
                           : i;
}

// What a step of one input is in registers: a vector as it lies in memory, or single elements.
template <int Kind, class A, bool Vector = side_by_side<Kind>> struct Loaded {
  A elements[step];

  __device__ __forceinline__ void load(const A* input, Index first, const Sizes& sizes, Index extent) {
    if constexpr (Kind == absent) return;
    if constexpr (Kind == channel || Kind == middle) {
      if (sizes.inner % step == 0) {  // one division for all elements of the step
        const A* start = input + place_of<Kind>(first, sizes, extent);
#pragma unroll
        for (int e = 0; e < step; ++e) elements[e] = start[Kind == middle ? e : 0];
        return;
      }
    }
#pragma unroll
    for (int e = 0; e < step; ++e) elements[e] = input[place_of<Kind>(first + e, sizes, extent)];
  }
  __device__ __forceinline__ void unpack(float (&values)[step][6], int j) const {
    if constexpr (Kind == absent) return;
#pragma unroll
    for (int e = 0; e < step; ++e) values[e][j] = ac::to_float(elements[e]);
  }
};
template <int Kind, class A> struct Loaded<Kind, A, true> {
  ac::Vector<A, step> vector;

  __device__ __forceinline__ void load(const A* input, Index first, const Sizes& sizes, Index extent) {
    const A* start = input + place_of<Kind>(first, sizes, extent);
    if constexpr (Plan::past_l1 && Kind == full && ac::Vector<A, step>::words <= 4) {
      ac::load_stream(vector.bits, start);
    } else {
      vector = ac::Vector<A, step>::load(start);
    }
  }
  __device__ __forceinline__ void unpack(float (&values)[step][6], int j) const {
    float chunk[step];
    vector.unpack(chunk);
#pragma unroll
    for (int e = 0; e < step; ++e) values[e][j] = chunk[e];
  }
};

// Writes column `j` of `values`: this input's elements first .. first + step - 1, as far as they exist, one by one.
template <int Kind, class A>
__device__ __forceinline__ void load_elements(float (&values)[step][6], int j, const A* input, Index first, const Sizes& sizes,
                                              Index extent) {
  if constexpr (Kind == absent) return;
#pragma unroll
  for (int e = 0; e < step; ++e) {
    if (Plan::even || first + e < sizes.count) values[e][j] = ac::to_float(input[place_of<Kind>(first + e, sizes, extent)]);
  }
}

template <class A> __device__ __forceinline__ void store_vector(const float (&results)[step], A* out) {
  if constexpr (step > 1) ac::Vector<A, step>::pack(results).store(out);
}

__device__ __forceinline__ void apply(const float (&values)[step][6], float (&results)[step]) {
#pragma unroll
  for (int e = 0; e < step; ++e) results[e] = Epilogue::apply(values[e]);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
elementwise_kernel(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, const Plan::A3* in3, const Plan::A4* in4,
                   const Plan::A5* in5, Plan::T* out, long long count, int columns, long long inner, long long extent0,
                   long long extent1, long long extent2, long long extent3, long long extent4, long long extent5) {
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const Sizes sizes{static_cast<Index>(count), static_cast<Index>(Plan::columns > 0 ? Plan::columns : columns), static_cast<Index>(inner)};
  const Index first = (static_cast<Index>(blockIdx.x) * Plan::threads + static_cast<int>(threadIdx.x)) * step;
  if (!Plan::even && first >= sizes.count) return;
  float values[step][6] = {};
  float results[step];
  if constexpr (step > 1) {
    const unsigned long long bits = unaligned(out) | unaligned<Plan::broadcast_0>(in0) | unaligned<Plan::broadcast_1>(in1) |
                                    unaligned<Plan::broadcast_2>(in2) | unaligned<Plan::broadcast_3>(in3) |
                                    unaligned<Plan::broadcast_4>(in4) | unaligned<Plan::broadcast_5>(in5);
    if ((Plan::even || first + step <= sizes.count) && bits == 0) {
      Loaded<Plan::broadcast_0, Plan::A0> step0;
      Loaded<Plan::broadcast_1, Plan::A1> step1;
      Loaded<Plan::broadcast_2, Plan::A2> step2;
      Loaded<Plan::broadcast_3, Plan::A3> step3;
      Loaded<Plan::broadcast_4, Plan::A4> step4;
      Loaded<Plan::broadcast_5, Plan::A5> step5;
      step0.load(in0, first, sizes, extent0);
      step1.load(in1, first, sizes, extent1);
      step2.load(in2, first, sizes, extent2);
      step3.load(in3, first, sizes, extent3);
      step4.load(in4, first, sizes, extent4);
      step5.load(in5, first, sizes, extent5);
      step0.unpack(values, 0);
      step1.unpack(values, 1);
      step2.unpack(values, 2);
      step3.unpack(values, 3);
      step4.unpack(values, 4);
      step5.unpack(values, 5);
      apply(values, results);
      store_vector(results, out + first);
      return;
    }
  }
  load_elements<Plan::broadcast_0>(values, 0, in0, first, sizes, extent0);
  load_elements<Plan::broadcast_1>(values, 1, in1, first, sizes, extent1);
  load_elements<Plan::broadcast_2>(values, 2, in2, first, sizes, extent2);
  load_elements<Plan::broadcast_3>(values, 3, in3, first, sizes, extent3);
  load_elements<Plan::broadcast_4>(values, 4, in4, first, sizes, extent4);
  load_elements<Plan::broadcast_5>(values, 5, in5, first, sizes, extent5);
  apply(values, results);
#pragma unroll
  for (int e = 0; e < step; ++e) {
    if (Plan::even || first + e < sizes.count) out[first + e] = ac::from_float<Plan::T>(results[e]);
  }
}
