// What the kernels of the family share: the scores, the running maximum and sum, the result of one score.
//
// A score is the expression of the plan over up to three inputs (scaled, masked, or the one input itself). The running
// maximum starts at the lowest finite number: a row without any finite score then has a sum of zero, and its results are
// NaN, as torch's are; an infinite or NaN score makes the sum NaN by itself.
#pragma once
#include <agentcompile/dtype.cuh>
#include <agentcompile/inputs.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>

namespace {

using T = Plan::T;
using Scores = ac::Inputs<Epilogue, ac::Input<Plan::kind_0, Plan::A0>, ac::Input<Plan::kind_1, Plan::A1>, ac::Input<Plan::kind_2, Plan::A2>>;
constexpr float lowest = -3.402823466e38f;

__device__ __forceinline__ Scores scores_of(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, long long period0,
                                            long long period1, long long period2) {
  return Scores{{in0, period0}, {in1, period1}, {in2, period2}};
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(static_cast<int>(0xff800000u)); }

// Maximum and sum of exp(score - maximum) of the scores so far; one pass over them is enough.
struct Online {
  float maximum;
  float sum;

  static __device__ __forceinline__ Online nothing() { return Online{lowest, 0.0f}; }

  template <int Step> __device__ __forceinline__ void add(const float (&scores)[Step]) {
    float larger = maximum;
#pragma unroll
    for (int e = 0; e < Step; ++e) larger = fmaxf(larger, scores[e]);
    sum *= expf(maximum - larger);
    maximum = larger;
#pragma unroll
    for (int e = 0; e < Step; ++e) sum += expf(scores[e] - maximum);
  }

  __device__ __forceinline__ void add(Online other) {
    const float larger = fmaxf(maximum, other.maximum);
    sum = sum * expf(maximum - larger) + other.sum * expf(other.maximum - larger);
    maximum = larger;
  }

  // Of Width neighbouring lanes; every lane gets the result.
  template <int Width = ac::warp_size> __device__ __forceinline__ void merge_warp() {
    const float larger = ac::warp_max<Width>(maximum);
    sum = ac::warp_sum<Width>(sum * expf(maximum - larger));
    maximum = larger;
  }

  // What a result is made with: the logarithm of the sum, or its inverse.
  __device__ __forceinline__ float factor() const { return Plan::log ? logf(sum) : 1.0f / sum; }
};

// exp(difference) as precisely as the result is kept.
__device__ __forceinline__ float exponential(float difference) {
  if constexpr (sizeof(T) == 2) return ac::quick_exp(difference);
  return expf(difference);
}

// Of `Warps` whole warps, where the scores of one row are; `states` holds one entry per warp in shared memory. Every thread gets the result.
template <int Warps> __device__ __forceinline__ Online merge_block(Online own, Online* states, int warp, int lane) {
  own.merge_warp();
  if constexpr (Warps > 1) {
    if (lane == 0) states[warp] = own;
    __syncthreads();
    own = lane < Warps ? states[lane] : Online::nothing();
    own.merge_warp();
  }
  return own;
}

__device__ __forceinline__ float result(float score, float maximum, float factor) {
  if constexpr (Plan::log) return score - maximum - factor;
  return expf(score - maximum) * factor;
}

}  // namespace
