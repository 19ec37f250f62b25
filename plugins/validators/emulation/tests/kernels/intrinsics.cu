// One warp (or block) computes something that the test knows in closed form.
#include <agentcompile/ptx.cuh>

// shuffled [6][32]: idx 5, xor 3, down 2, up 2, xor 4 within segments of 8, idx 1 within segments of 16
extern "C" __global__ void shuffles(const int* in, int* out) {
  const int lane = threadIdx.x, value = in[lane];
  const unsigned all = 0xffffffffu;
  out[0 * 32 + lane] = __shfl_sync(all, value, 5);
  out[1 * 32 + lane] = __shfl_xor_sync(all, value, 3);
  out[2 * 32 + lane] = __shfl_down_sync(all, value, 2);
  out[3 * 32 + lane] = __shfl_up_sync(all, value, 2);
  out[4 * 32 + lane] = __shfl_xor_sync(all, value, 4, 8);
  out[5 * 32 + lane] = __shfl_sync(all, value, 1, 16);
}

// votes [6][32]: ballot, any, all, match, add, signed max; half-warps act on their own masks
extern "C" __global__ void votes(const int* in, int* out) {
  const int lane = threadIdx.x, value = in[lane];
  const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  if (lane < 16) {
    out[0 * 32 + lane] = static_cast<int>(__ballot_sync(half, value > 3));
  } else {
    out[0 * 32 + lane] = static_cast<int>(__ballot_sync(half, value > 3));
  }
  out[1 * 32 + lane] = __any_sync(half, value == 7);
  out[2 * 32 + lane] = __all_sync(half, value >= 0);
  out[3 * 32 + lane] = static_cast<int>(__match_any_sync(0xffffffffu, value));
  out[4 * 32 + lane] = __reduce_add_sync(0xffffffffu, value);
  out[5 * 32 + lane] = __reduce_max_sync(0xffffffffu, value - 100);
}

extern "C" __global__ void block_votes(const int* in, int* out) {
  const int value = in[threadIdx.x];
  out[threadIdx.x] = __syncthreads_count(value > 3) * 100 + __syncthreads_and(value >= 0) * 10 + __syncthreads_or(value == 99);
}

// d [16][8] = a [16][16] * b [8][16]^T + c, the fragments loaded by ldmatrix. One warp.
template <class T>
__device__ __forceinline__ void multiply(const T* a, const T* b, float* d, T* staged_a, T* staged_b) {
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) staged_a[i] = a[i];
  for (int i = lane; i < 256; i += 32) staged_b[i] = b[i % 128];
  __syncwarp();
  unsigned fragment_a[4], fragment_b[4];
  ac::ldmatrix_x4(fragment_a, staged_a + (lane % 16) * 16 + (lane / 16) * 8);
  ac::ldmatrix_x4(fragment_b, staged_b + (lane % 8) * 16 + ((lane / 8) % 2) * 8);
  const unsigned columns[2] = {fragment_b[0], fragment_b[1]};
  float sum[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  ac::mma_m16n8k16<T>(sum, fragment_a, columns);
  for (int i = 0; i < 4; ++i) d[(lane / 4 + (i / 2) * 8) * 8 + (lane % 4) * 2 + i % 2] = sum[i];
}
extern "C" __global__ void multiply_f16(const __half* a, const __half* b, float* d) {
  __shared__ __align__(16) __half staged_a[256], staged_b[256];
  multiply(a, b, d, staged_a, staged_b);
}
extern "C" __global__ void multiply_bf16(const __nv_bfloat16* a, const __nv_bfloat16* b, float* d) {
  __shared__ __align__(16) __nv_bfloat16 staged_a[256], staged_b[256];
  multiply(a, b, d, staged_a, staged_b);
}

// Four 8x8 matrices, transposed: out [4][8][8].
extern "C" __global__ void transpose_matrices(const unsigned short* in, unsigned short* out) {
  __shared__ __align__(16) unsigned short staged[256];
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) staged[i] = in[i];
  __syncwarp();
  unsigned fragment[4];
  ac::ldmatrix_x4_transposed(fragment, staged + lane * 8);
  for (int m = 0; m < 4; ++m) {
    out[m * 64 + (lane / 4) * 8 + (lane % 4) * 2] = static_cast<unsigned short>(fragment[m]);
    out[m * 64 + (lane / 4) * 8 + (lane % 4) * 2 + 1] = static_cast<unsigned short>(fragment[m] >> 16);
  }
}

// Rounds floats to half and to bfloat16 and back.
extern "C" __global__ void round_trip(const float* in, float* half, float* bfloat16, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  half[i] = __half2float(__float2half_rn(in[i]));
  bfloat16[i] = __bfloat162float(__float2bfloat16_rn(in[i]));
}

// Halves as floats and floats as halves, one by one and in pairs: what a bit pattern becomes, as bits.
extern "C" __global__ void convert_halves(const unsigned short* halves, const float* floats, float* widened, unsigned short* narrowed, int count) {
  const int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  const bool paired = blockIdx.x % 2;
  const __half* in = reinterpret_cast<const __half*>(halves);
  __half* out = reinterpret_cast<__half*>(narrowed);
  if (paired) {
    *reinterpret_cast<float2*>(widened + i) = __half22float2(*reinterpret_cast<const __half2*>(in + i));
    *reinterpret_cast<__half2*>(out + i) = __floats2half2_rn(floats[i], floats[i + 1]);
  } else {
    for (int k = i; k < i + 2; ++k) widened[k] = __half2float(in[k]), out[k] = __float2half_rn(floats[k]);
  }
}

// old values and results of atomics, one thread: the semantics, not the concurrency
extern "C" __global__ void atomics(unsigned* out) {
  unsigned* cell = out;
  out[1] = atomicAdd(cell, 5u);
  out[2] = atomicInc(cell, 6u);
  out[3] = atomicInc(cell, 6u);
  out[4] = atomicInc(cell, 6u);
  out[5] = atomicDec(cell, 3u);
  out[6] = atomicCAS(cell, 3u, 9u);
  out[7] = atomicCAS(cell, 3u, 11u);
  out[8] = atomicMax(cell, 4u);
  out[9] = atomicExch(cell, 1u);
}

// cp.async with zero fill: every second 16 bytes are zero
extern "C" __global__ void zero_fill(const float* in, float* out) {
  __shared__ __align__(16) float staged[128];
  ac::cp_async16_zero_fill(staged + threadIdx.x * 4, in + threadIdx.x * 4, threadIdx.x % 2 == 0);
  ac::cp_async_commit();
  ac::cp_async_wait<0>();
  __syncthreads();
  for (int i = threadIdx.x; i < 128; i += 32) out[i] = staged[i];
}

extern "C" __global__ void coordinates(int* out) {
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[block * (blockDim.x * blockDim.y * blockDim.z) + thread] = threadIdx.z * 100 + threadIdx.y * 10 + threadIdx.x;
}
