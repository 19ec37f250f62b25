// The smaller and the greater of two numbers as torch has them: NaN where either is NaN, which fminf and fmaxf leave out.
#pragma once

namespace ac {

__device__ __forceinline__ float smaller(float a, float b) { return a != a || a < b ? a : b; }
__device__ __forceinline__ float greater(float a, float b) { return a != a || a > b ? a : b; }

}  // namespace ac
