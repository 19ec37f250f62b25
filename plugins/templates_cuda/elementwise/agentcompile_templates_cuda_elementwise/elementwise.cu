// Pointwise expression over up to six inputs: out[i] = Epilogue::apply({in0[i], in1[i], ...}), computed in fp32.
//
// An input is as large as out (Plan::broadcast_j = 0), one row of `columns` elements that repeats (1), one element (2), or
// one of `extent_j` elements per channel, of which `inner` neighbours of out are (4); absent inputs are null. out [count]; it may
// alias a full input. A thread owns Plan::step neighbouring elements: one 16-byte
// vector where all types have one size and the addresses allow it.
// Wins where a pointwise chain stands between operators that no other family fuses.
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include "plan.cuh"

namespace {

constexpr int step = Plan::step;
enum Broadcast : int { full = 0, row = 1, scalar = 2, absent = 3, channel = 4 };

template <int Kind, class A> __device__ __forceinline__ bool vector_ready(const A* input) {
  return Kind != full || (step == ac::Vec16<A>::size && ac::is_aligned16(input));
}

// Writes column `j` of `values`: this input's elements first .. first + step - 1, as far as they exist.
template <int Kind, class A>
__device__ __forceinline__ void load_input(float (&values)[step][6], int j, const A* input, long long first, long long count,
                                           int columns, long long inner, long long extent, bool vectors) {
  if constexpr (Kind != absent) {
    if constexpr (Kind == full && step == ac::Vec16<A>::size) {
      if (vectors) {
        float chunk[step];
        ac::Vec16<A>::load(input + first).unpack(chunk);
#pragma unroll
        for (int e = 0; e < step; ++e) values[e][j] = chunk[e];
        return;
      }
    }
#pragma unroll
    for (int e = 0; e < step; ++e) {
      const long long i = first + e;
      const long long place = Kind == scalar ? 0 : Kind == row ? i % columns : Kind == channel ? i / inner % extent : i;
      if (i < count) values[e][j] = ac::to_float(input[place]);
    }
  }
}

// One 16-byte store, where a thread's elements make one vector of A.
template <class A> __device__ __forceinline__ void store_vector(const float (&results)[step], A* out) {
  if constexpr (step == ac::Vec16<A>::size) ac::Vec16<A>::pack(results).store(out);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
elementwise_kernel(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, const Plan::A3* in3, const Plan::A4* in4,
                   const Plan::A5* in5, Plan::T* out, long long count, int columns, long long inner, long long extent0,
                   long long extent1, long long extent2, long long extent3, long long extent4, long long extent5) {
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const long long first = (static_cast<long long>(blockIdx.x) * Plan::threads + threadIdx.x) * step;
  if (first >= count) return;
  const bool vectors = first + step <= count && step == ac::Vec16<Plan::T>::size && ac::is_aligned16(out) &&
                       vector_ready<Plan::broadcast_0>(in0) && vector_ready<Plan::broadcast_1>(in1) &&
                       vector_ready<Plan::broadcast_2>(in2) && vector_ready<Plan::broadcast_3>(in3) &&
                       vector_ready<Plan::broadcast_4>(in4) && vector_ready<Plan::broadcast_5>(in5);
  float values[step][6] = {};
  load_input<Plan::broadcast_0>(values, 0, in0, first, count, columns, inner, extent0, vectors);
  load_input<Plan::broadcast_1>(values, 1, in1, first, count, columns, inner, extent1, vectors);
  load_input<Plan::broadcast_2>(values, 2, in2, first, count, columns, inner, extent2, vectors);
  load_input<Plan::broadcast_3>(values, 3, in3, first, count, columns, inner, extent3, vectors);
  load_input<Plan::broadcast_4>(values, 4, in4, first, count, columns, inner, extent4, vectors);
  load_input<Plan::broadcast_5>(values, 5, in5, first, count, columns, inner, extent5, vectors);
  float results[step];
#pragma unroll
  for (int e = 0; e < step; ++e) results[e] = Epilogue::apply(values[e]);
  if (vectors) {
    store_vector(results, out + first);
    return;
  }
#pragma unroll
  for (int e = 0; e < step; ++e) {
    if (first + e < count) out[first + e] = ac::from_float<Plan::T>(results[e]);
  }
}
