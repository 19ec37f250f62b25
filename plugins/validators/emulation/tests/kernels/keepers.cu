// Kernels that keep something between launches, let others see a counter too early, or read early what they may not know yet; each must
// compile for a GPU too.
#include <agentcompile/ptx.cuh>

__device__ int launches_so_far;
__device__ const float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};

extern "C" __global__ void keeps_a_count(const float* in, float* out, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i == 0) launches_so_far = launches_so_far + 1;
  if (i < count) out[i] = launches_so_far > 3 ? 0.0f : in[i];
}
extern "C" __global__ void counts_atomically(const float* in, float* out, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = in[i];
  if (i == 0) atomicAdd(&launches_so_far, 1);
}
extern "C" __global__ void reads_a_table(const float* in, float* out, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = in[i] * table[i % 4];
}

template <bool FENCED> __device__ __forceinline__ void advance(const float* in, float* out, long long* position) {
  if (threadIdx.x != 0) return;
  out[0] = in[0];
  if (FENCED) __threadfence();
  position[0] = position[0] + 1;
}
extern "C" __global__ void advances_after_a_fence(const float* in, float* out, long long* position) { advance<true>(in, out, position); }
extern "C" __global__ void advances_without_a_fence(const float* in, float* out, long long* position) { advance<false>(in, out, position); }

// One row more than the array has: a neighbour in shared memory is no part of the sum.
extern "C" __global__ void sums_beyond_an_array(const float* in, float* out, int count) {
  __shared__ float parts[4];
  if (threadIdx.x < 4) parts[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int part = 0; part <= 4; ++part) total += parts[part];
  if (threadIdx.x < count) out[threadIdx.x] = total;
}

// out[block * count + i] is in[i] as it is read in front of the dependency wait, or as it is.
template <bool SETTLED> __device__ __forceinline__ void copy_early(const long long* in, long long* out, int count) {
  const int i = threadIdx.x;
  long long value = 0;
  if (i < count) value = SETTLED ? in[i] : ac::load_unsettled(in + i);
  ac::grid_dependency_wait();
  if (i < count) out[blockIdx.x * count + i] = value;
}
extern "C" __global__ void copies_unsettled(const long long* in, long long* out, int count) { copy_early<false>(in, out, count); }
extern "C" __global__ void copies_as_if_settled(const long long* in, long long* out, int count) { copy_early<true>(in, out, count); }
