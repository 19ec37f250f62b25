// Kernels with one planted mistake each (`bug_...`) beside the same kernel without it (`clean_...`). A block of 64 threads
// (unless said otherwise) turns `in` [count] into `out` [count]; every kernel must compile for a GPU too.
#include <agentcompile/ptx.cuh>

namespace {
constexpr int threads = 64;

// out[i] = in[mirror of i within its block], by way of shared memory.
template <bool SYNC>
__device__ __forceinline__ void mirror(const float* in, float* out, int count, float* staged) {
  const int i = blockIdx.x * threads + threadIdx.x;
  staged[threadIdx.x] = i < count ? in[i] : 0.0f;
  if (SYNC) __syncthreads();
  if (i < count) out[i] = staged[threads - 1 - threadIdx.x];
}

// Two rounds through the same shared memory: the barrier at the end of a round protects it from the next one.
template <bool SYNC>
__device__ __forceinline__ void two_rounds(const float* in, float* out, int count, float* staged) {
  const int i = blockIdx.x * threads + threadIdx.x;
  float sum = 0.0f;
  for (int round = 0; round < 2; ++round) {
    staged[threadIdx.x] = i < count ? in[i] + round : 0.0f;
    __syncthreads();
    sum += staged[threads - 1 - threadIdx.x];
    if (SYNC) __syncthreads();
  }
  if (i < count) out[i] = sum;
}
}  // namespace

extern "C" __global__ void clean_mirror(const float* in, float* out, int count) {
  __shared__ float staged[threads];
  mirror<true>(in, out, count, staged);
}
extern "C" __global__ void bug_missing_barrier(const float* in, float* out, int count) {
  __shared__ float staged[threads];
  mirror<false>(in, out, count, staged);
}
extern "C" __global__ void clean_two_rounds(const float* in, float* out, int count) {
  __shared__ float staged[threads];
  two_rounds<true>(in, out, count, staged);
}
extern "C" __global__ void bug_missing_trailing_barrier(const float* in, float* out, int count) {
  __shared__ float staged[threads];
  two_rounds<false>(in, out, count, staged);
}

// --- bounds and rights --------------------------------------------------------------------------------------------------------
extern "C" __global__ void bug_read_past_end(const float* in, float* out, int count) {
  const int i = blockIdx.x * threads + threadIdx.x;
  if (i < count) out[i] = in[i + 1];
}
extern "C" __global__ void bug_write_past_end(const float* in, float* out, int count) {
  const int i = blockIdx.x * threads + threadIdx.x;
  if (i <= count) out[i] = in[min(i, count - 1)];
}
extern "C" __global__ void bug_write_read_only(float* in, float* out, int count) {
  const int i = blockIdx.x * threads + threadIdx.x;
  if (i < count) out[i] = in[i];
  if (i == 3) in[i] = 0.0f;
}
extern "C" __global__ void bug_dynamic_shared_too_small(const float* in, float* out, int count) {
  AC_DYNAMIC_SHARED(float, staged);
  mirror<true>(in, out, count, staged + 1);  // the launch gives exactly `threads` floats
}
extern "C" __global__ void bug_misaligned_vector(const float* in, float* out, int count) {
  const uint4 bits = ac::load_stream16(in + 1);
  if (threadIdx.x == 0) out[0] = __uint_as_float(bits.x ^ bits.y ^ bits.z ^ bits.w);
}
extern "C" __global__ void bug_misaligned_vector_of_elements(const float* in, float* out, int count) {
  const uint4 bits = *reinterpret_cast<const uint4*>(in + 1);  // one element is used, so g++ loads no more
  if (threadIdx.x == 0) out[0] = __uint_as_float(bits.y);
}
extern "C" __global__ void bug_reads_its_output(const float* in, float* out, int count) {
  const int i = blockIdx.x * threads + threadIdx.x;
  if (i < count) out[i] += in[i];
}

// --- shared memory, warps, barriers -------------------------------------------------------------------------------------------
extern "C" __global__ void bug_uninitialised_shared(const float* in, float* out, int count) {
  __shared__ float staged[threads];
  const int i = blockIdx.x * threads + threadIdx.x;
  if (threadIdx.x != 7) staged[threadIdx.x] = i < count ? in[i] : 0.0f;
  __syncthreads();
  if (i < count) out[i] = staged[threadIdx.x];
}
extern "C" __global__ void bug_first_load_left_out(const float* in, float* out, int count) {
  const int first = (blockIdx.x * threads + threadIdx.x) * 2;
  float ahead, sum = 0.0f;  // `ahead` should hold in[first] here
  for (int i = first; i < first + 2 && i < count; ++i) {
    sum += ahead;
    ahead = i + 1 < count ? in[i + 1] : 0.0f;
  }
  if (first < count) out[first / 2] = sum;
}
extern "C" __global__ void bug_missing_warp_barrier(const float* in, float* out, int count) {
  __shared__ float staged[threads];
  const int i = blockIdx.x * threads + threadIdx.x;
  staged[threadIdx.x] = i < count ? in[i] : 0.0f;
  const float neighbour = staged[threadIdx.x ^ 1];
  if (i < count) out[i] = neighbour;
}
extern "C" __global__ void clean_warp_barrier(const float* in, float* out, int count) {
  __shared__ float staged[threads];
  const int i = blockIdx.x * threads + threadIdx.x;
  staged[threadIdx.x] = i < count ? in[i] : 0.0f;
  __syncwarp();
  const float neighbour = staged[threadIdx.x ^ 1];
  if (i < count) out[i] = neighbour;
}
extern "C" __global__ void bug_divergent_barrier(const float* in, float* out, int count) {
  const int i = blockIdx.x * threads + threadIdx.x;
  if (threadIdx.x < 40) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  if (i < count) out[i] = in[i];
}
extern "C" __global__ void bug_barrier_after_exit(const float* in, float* out, int count) {
  const int i = blockIdx.x * threads + threadIdx.x;
  if (i >= count) return;
  out[i] = in[i];
  __syncthreads();
}
extern "C" __global__ void bug_divergent_shuffle(const float* in, float* out, int count) {
  const int i = blockIdx.x * threads + threadIdx.x;
  float value = i < count ? in[i] : 0.0f;
  if (threadIdx.x % 32 < 16) value += __shfl_xor_sync(0xffffffffu, value, 8);
  if (i < count) out[i] = value;
}
extern "C" __global__ void bug_shuffle_after_exit(const float* in, float* out, int count) {
  const int i = blockIdx.x * threads + threadIdx.x;
  if (threadIdx.x % 32 == 31) return;
  if (i < count) out[i] = __shfl_xor_sync(0xffffffffu, in[i], 1);
}
extern "C" __global__ void bug_shared_histogram(const float* in, float* out, int count) {
  __shared__ float bins[8];
  const int i = blockIdx.x * threads + threadIdx.x;
  if (threadIdx.x < 8) bins[threadIdx.x] = 0.0f;
  __syncthreads();
  if (i < count) bins[threadIdx.x % 8] += in[i];
  __syncthreads();
  if (i < count) out[i] = bins[threadIdx.x % 8];
}
extern "C" __global__ void clean_shared_histogram(const float* in, float* out, int count) {
  __shared__ float bins[8];
  const int i = blockIdx.x * threads + threadIdx.x;
  if (threadIdx.x < 8) bins[threadIdx.x] = 0.0f;
  __syncthreads();
  if (i < count) atomicAdd(&bins[threadIdx.x % 8], in[i]);
  __syncthreads();
  if (i < count) out[i] = bins[threadIdx.x % 8];
}
extern "C" __global__ void bug_hang(const float* in, float* out, int count) {
  const int i = blockIdx.x * threads + threadIdx.x;
  float value = i < count ? in[i] : 0.0f;
  while (value < 1e30f) value = value * 0.5f;
  if (i < count) out[i] = value;
}

// --- asynchronous copies ------------------------------------------------------------------------------------------------------
namespace {
// 16 bytes per thread: out[i] = in[i] for 4 * threads elements per block.
template <bool WAIT>
__device__ __forceinline__ void through_cp_async(const float* in, float* out, float* staged) {
  const int first = (blockIdx.x * threads + threadIdx.x) * 4;
  ac::cp_async16(staged + threadIdx.x * 4, in + first);
  ac::cp_async_commit();
  if (WAIT) ac::cp_async_wait<0>();
  __syncthreads();
  for (int j = 0; j < 4; ++j) out[first + j] = staged[threadIdx.x * 4 + j];
}

enum class Ring { clean, no_full_wait, no_empty_wait, one_consumer_skips_wait, wrong_bytes, no_init_fence, no_init_barrier };

// Warp 0 fills two stages of 64 floats by bulk copies, warp 1 empties them: out = in for `count` (a multiple of 64) elements.
template <Ring KIND>
__device__ __forceinline__ void ring(const float* in, float* out, int count, float* stages, ac::Mbarrier* full, ac::Mbarrier* empty) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; ++s) {
      ac::mbarrier_init(&full[s], 1);
      ac::mbarrier_init(&empty[s], 32);
    }
    if (KIND != Ring::no_init_fence) ac::mbarrier_init_fence();
  }
  if (KIND != Ring::no_init_barrier) __syncthreads();
  const int tiles = count / 64;
  if (threadIdx.x == 0) {
    for (int tile = 0; tile < tiles; ++tile) {
      const int s = tile % 2;
      if (tile >= 2 && KIND != Ring::no_empty_wait) ac::mbarrier_wait(&empty[s], (tile / 2 - 1) & 1);
      ac::mbarrier_arrive_expect_bytes(&full[s], KIND == Ring::wrong_bytes ? 512 : 256);
      ac::bulk_copy_to_shared(stages + s * 64, in + tile * 64, 256, &full[s]);
    }
  } else if (threadIdx.x >= 32) {
    for (int tile = 0; tile < tiles; ++tile) {
      const int s = tile % 2;
      const bool skips = KIND == Ring::no_full_wait || (KIND == Ring::one_consumer_skips_wait && lane == 5);
      if (!skips) ac::mbarrier_wait(&full[s], (tile / 2) & 1);
      for (int j = lane; j < 64; j += 32) out[tile * 64 + j] = stages[s * 64 + j];
      ac::mbarrier_arrive(&empty[s]);
    }
  }
}
}  // namespace

extern "C" __global__ void clean_cp_async(const float* in, float* out, int count) {
  __shared__ __align__(16) float staged[4 * threads];
  through_cp_async<true>(in, out, staged);
}
extern "C" __global__ void bug_missing_cp_async_wait(const float* in, float* out, int count) {
  __shared__ __align__(16) float staged[4 * threads];
  through_cp_async<false>(in, out, staged);
}
#define RING_KERNEL(name, kind)                                                 \
  extern "C" __global__ void name(const float* in, float* out, int count) {     \
    AC_DYNAMIC_SHARED(float, stages);                                           \
    __shared__ ac::Mbarrier full[2], empty[2];                                  \
    ring<kind>(in, out, count, stages, full, empty);                            \
  }
RING_KERNEL(clean_ring, Ring::clean)
RING_KERNEL(bug_missing_bulk_wait, Ring::no_full_wait)
RING_KERNEL(bug_ring_refilled_too_early, Ring::no_empty_wait)
RING_KERNEL(bug_one_consumer_skips_wait, Ring::one_consumer_skips_wait)
RING_KERNEL(bug_wrong_expected_bytes, Ring::wrong_bytes)
RING_KERNEL(bug_missing_init_fence, Ring::no_init_fence)
RING_KERNEL(bug_missing_init_barrier, Ring::no_init_barrier)

extern "C" __global__ void bug_exit_with_copy_in_flight(const float* in, float* out, int count) {
  AC_DYNAMIC_SHARED(float, stages);
  __shared__ ac::Mbarrier full;
  if (threadIdx.x == 0) {
    ac::mbarrier_init(&full, 1);
    ac::mbarrier_init_fence();
    ac::mbarrier_arrive_expect_bytes(&full, 256);
    ac::bulk_copy_to_shared(stages, in, 256, &full);
  }
  const int i = blockIdx.x * threads + threadIdx.x;
  if (i < count) out[i] = in[i];
}

template <bool WAIT>
__device__ __forceinline__ void left_behind(const float* in, float* out, int count, float* staged) {
  const int i = blockIdx.x * threads + threadIdx.x;
  ac::cp_async16_zero_fill(staged + threadIdx.x * 4, in + threadIdx.x * 4, threadIdx.x < 16);
  ac::cp_async_commit();
  if (WAIT && threadIdx.x < 16) ac::cp_async_wait<0>();  // what others copy is zeros, which nobody reads
  if (i < count) out[i] = in[i];
}
extern "C" __global__ void clean_exit_behind_cp_async(const float* in, float* out, int count) {
  __shared__ __align__(16) float staged[4 * threads];
  left_behind<true>(in, out, count, staged);
}
extern "C" __global__ void bug_exit_with_cp_async_in_flight(const float* in, float* out, int count) {
  __shared__ __align__(16) float staged[4 * threads];
  left_behind<false>(in, out, count, staged);
}

// --- named barriers -------------------------------------------------------------------------------------------------------------
// 96 threads: the first two warps exchange through shared memory, the third does not take part.
extern "C" __global__ void clean_named_barrier(const float* in, float* out, int count) {
  __shared__ float staged[threads];
  if (threadIdx.x >= threads) return;
  staged[threadIdx.x] = in[threadIdx.x];
  ac::named_barrier_sync(1, threads);
  out[threadIdx.x] = staged[threads - 1 - threadIdx.x];
}
extern "C" __global__ void bug_named_barrier_count(const float* in, float* out, int count) {
  if (threadIdx.x >= threads) return;
  ac::named_barrier_sync(1, 96);
  out[threadIdx.x] = in[threadIdx.x];
}

// --- between blocks -------------------------------------------------------------------------------------------------------------
extern "C" __global__ void bug_two_blocks_write(const float* in, float* out, int count) {
  const int i = blockIdx.x * threads + threadIdx.x;
  if (threadIdx.x == 0 && i < count) out[0] = in[i];
}
namespace {
// The last block to arrive adds the partial sums of all blocks in a fixed order: out[0] = sum of in.
template <bool FENCE, bool BARRIER, bool ACQUIRE = true>
__device__ __forceinline__ void last_arriver_sum(const float* in, float* out, int count, float* partial, unsigned* counter, bool* is_last) {
  const int i = blockIdx.x * threads + threadIdx.x;
  partial[blockIdx.x * threads + threadIdx.x] = i < count ? in[i] : 0.0f;
  if (FENCE) __threadfence();
  if (BARRIER) __syncthreads();
  if (threadIdx.x == 0) *is_last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  if (!*is_last) return;
  if (ACQUIRE) __threadfence();
  if (threadIdx.x == 0) {
    float sum = 0.0f;
    for (unsigned j = 0; j < gridDim.x * threads; ++j) sum += ac::load_relaxed(&partial[j]);
    out[0] = sum;
  }
}
}  // namespace
#define MERGE_KERNEL(name, ...)                                                                            \
  extern "C" __global__ void name(const float* in, float* out, int count, float* partial, unsigned* counter) {        \
    __shared__ bool is_last;                                                                                          \
    last_arriver_sum<__VA_ARGS__>(in, out, count, partial, counter, &is_last);                                     \
  }
MERGE_KERNEL(clean_last_arriver, true, true)
MERGE_KERNEL(bug_merge_without_fence, false, true)
MERGE_KERNEL(bug_merge_without_barrier, true, false)
MERGE_KERNEL(bug_merge_without_second_fence, true, true, false)

// --- programmatic dependent launch ------------------------------------------------------------------------------------------------
namespace {
enum class Dependency { clean, reads_early, writes_early, some_threads_exit };
// out = in * weight; `weight` is a constant and may be read before the wait.
template <Dependency KIND>
__device__ __forceinline__ void scale(const float* in, float* out, int count, const float* weight) {
  ac::launch_dependents();
  const int i = blockIdx.x * threads + threadIdx.x;
  const float factor = i < count ? weight[i] : 0.0f;
  float early = 0.0f;
  if (KIND == Dependency::reads_early && i < count) early = in[i];
  if (KIND == Dependency::writes_early && i < count) out[i] = factor;
  if (KIND == Dependency::some_threads_exit && i >= count) return;
  ac::grid_dependency_wait();
  if (i < count) out[i] = (KIND == Dependency::reads_early ? early : in[i]) * factor;
}
}  // namespace
#define DEPENDENCY_KERNEL(name, kind) \
  extern "C" __global__ void name(const float* in, float* out, int count, const float* weight) { scale<kind>(in, out, count, weight); }
DEPENDENCY_KERNEL(clean_dependency, Dependency::clean)
DEPENDENCY_KERNEL(bug_read_before_dependency_wait, Dependency::reads_early)
DEPENDENCY_KERNEL(bug_write_before_dependency_wait, Dependency::writes_early)
DEPENDENCY_KERNEL(bug_exit_without_dependency_wait, Dependency::some_threads_exit)
