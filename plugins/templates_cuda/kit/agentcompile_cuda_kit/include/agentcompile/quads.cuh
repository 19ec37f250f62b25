// Results of tensor-core products on their way out: a lane has two neighbouring columns of every eight, four lanes a row.
#pragma once
#include <agentcompile/dtype.cuh>

namespace ac {

// Two neighbouring results in one word.
template <class T> __device__ __forceinline__ unsigned packed(float low, float high) {
  const T both[2] = {from_float<T>(low), from_float<T>(high)};
  return *reinterpret_cast<const unsigned*>(both);
}

// Four words of each of four neighbouring lanes change places: word i of lane j is word j of lane i then. Two neighbouring results of each
// of four columns of eight become eight neighbours of one, which are stored at once.
__device__ __forceinline__ void transpose(unsigned (&words)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const unsigned other = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[i | bit], bit);
      words[i] = upper ? other : words[i];
      words[i | bit] = upper ? words[i | bit] : other;
    }
  }
}

}  // namespace ac
