// Several independent runs of a kernel in one grid: run number r has the blocks whose z is r * AC_RUN_DEPTH and the next ones. What follows
// this header sees the blocks of its own run alone.
#pragma once

namespace ac {
__device__ __forceinline__ unsigned number_of_run() { return blockIdx.z / AC_RUN_DEPTH; }
__device__ __forceinline__ uint3 block_of_run() { return make_uint3(blockIdx.x, blockIdx.y, blockIdx.z % AC_RUN_DEPTH); }
__device__ __forceinline__ dim3 grid_of_run() { return dim3(gridDim.x, gridDim.y, AC_RUN_DEPTH); }
}  // namespace ac

#undef blockIdx
#undef gridDim
#define blockIdx (::ac::block_of_run())
#define gridDim (::ac::grid_of_run())
