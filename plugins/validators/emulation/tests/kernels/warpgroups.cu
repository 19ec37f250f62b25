// Tiles of the copy engine, and products of one warpgroup: out [64][128] = a [64][64] times b [128][64] transposed, and the same with one
// mistake each.
#include <agentcompile/wgmma.cuh>

namespace {
constexpr int rows = 64, columns = 128, terms = 64;

enum class Product {
  clean, two_groups, no_wait, read_early, no_fence, no_commit, written_early, refilled, stored, lanes_differ, warps_differ, warp_missing,
  misaligned, not_swizzled, outside, overlapping, stored_and_fenced, copied_and_fenced, fenced_first, fenced_late, fenced_by_another,
  copy_fenced_early
};

// The barrier, for whom the calling thread expects bytes.
__device__ __forceinline__ void fetch(unsigned char* shared, const wg::Tiles& tiles, int across, unsigned bytes, ac::Mbarrier* full) {
  ac::mbarrier_arrive_expect_bytes(full, bytes);
  wg::fetch<1>(shared, tiles, 0, across, 0, 0, full, 1);
}

__device__ __forceinline__ void multiply(float (&sums)[columns / 2], unsigned long long a, unsigned long long b) {
  for (int t = 0; t < terms / 16; ++t) {
    wg::multiply<__half, columns, true, true>(sums, a + t * wg::next_terms<true>, b + t * wg::next_terms<true>);
  }
}

template <Product KIND>
__device__ __forceinline__ void product(const wg::Tiles& a, const wg::Tiles& b, const __half* line, float* out, ac::Mbarrier* full) {
  WG_DYNAMIC_SHARED(shared);
  unsigned char* const second = shared + rows * 128;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3; ++i) ac::mbarrier_init(full + i, i == 0 ? 2 : 1);
    ac::mbarrier_init_fence();
    fetch(shared, a, 0, rows * 128, full);
    fetch(second, b, 0, columns * 128, full);
  }
  __syncthreads();
  ac::mbarrier_wait(full, 0);
  if (KIND == Product::stored) {
    reinterpret_cast<__half*>(shared)[threadIdx.x] = __float2half(1.0f);
    __syncthreads();
  }
  __half* const mine = reinterpret_cast<__half*>(shared) + threadIdx.x;
  if (KIND == Product::stored_and_fenced || KIND == Product::fenced_first || KIND == Product::fenced_late ||
      KIND == Product::fenced_by_another) {
    const __half value = *mine;
    __syncthreads();
    if (KIND == Product::fenced_first) wg::proxy_fence();
    *mine = value;
    if (KIND == Product::stored_and_fenced) wg::proxy_fence();
    if (KIND == Product::fenced_by_another && threadIdx.x != 7) wg::proxy_fence();
    __syncthreads();
    if (KIND == Product::fenced_late) wg::proxy_fence();
  }
  if (KIND == Product::copied_and_fenced || KIND == Product::copy_fenced_early) {
    __syncthreads();
    if (threadIdx.x < 8) ac::cp_async16(shared + threadIdx.x * 16, line + threadIdx.x * 8);  // the first line, which is not permuted
    ac::cp_async_commit();
    if (KIND == Product::copy_fenced_early) wg::proxy_fence();
    ac::cp_async_wait<0>();
    if (KIND == Product::copied_and_fenced) wg::proxy_fence();
    __syncwarp();
    if (threadIdx.x == 0) ac::mbarrier_arrive(full + 2);
    ac::mbarrier_wait(full + 2, 0);
  }
  unsigned long long left = wg::descriptor(shared), right = wg::descriptor(second);
  if (KIND == Product::lanes_differ && lane == 3) left += 1024 / 16;
  if (KIND == Product::warps_differ && warp == 3) left += 1024 / 16;
  if (KIND == Product::misaligned) left += 128 / 16;
  if (KIND == Product::not_swizzled) left &= ~(3ull << 62);
  if (KIND == Product::outside) right += 8 * 1024 / 16;
  float sums[columns / 2] = {};
  if (KIND != Product::no_fence) wg::fence();
  if (KIND != Product::warp_missing || warp != 2) {
    multiply(sums, left, right);
    if (KIND != Product::no_commit) wg::commit();
  }
  if (KIND == Product::overlapping) {
    multiply(reinterpret_cast<float (&)[columns / 2]>(sums[1]), left, right);
    wg::commit();
  }
  float others[columns / 2] = {};
  if (KIND == Product::two_groups) {
    multiply(others, left, right);
    wg::commit();
    wg::wait<1>();
    wg::settle(sums);
  }
  if (KIND == Product::written_early) sums[5] = 1.0f;
  if (KIND == Product::refilled) {
    if (threadIdx.x == 0) fetch(shared, a, 1, rows * 128, full + 1);
    ac::mbarrier_wait(full + 1, 0);
  }
  if (KIND != Product::no_wait && KIND != Product::read_early) wg::wait<0>();
  if (KIND != Product::read_early) wg::settle(KIND == Product::two_groups ? others : sums);
  for (int i = 0; i < columns / 2; ++i) {
    const int row = warp * 16 + i / 2 % 2 * 8 + lane / 4, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    out[row * columns + column] = KIND == Product::two_groups ? (sums[i] + others[i]) / 2 : sums[i];
  }
  if (KIND == Product::read_early) wg::wait<0>();
}
}  // namespace

#define PRODUCT_KERNEL(name, kind)                                                                                           \
  extern "C" __global__ void name(const __grid_constant__ wg::Tiles a, const __grid_constant__ wg::Tiles b,                  \
                                  const __half* line, float* out) {                                                          \
    __shared__ ac::Mbarrier full[3];                                                                                         \
    product<Product::kind>(a, b, line, out, full);                                                                           \
  }
PRODUCT_KERNEL(clean_product, clean)
PRODUCT_KERNEL(clean_two_groups, two_groups)
PRODUCT_KERNEL(bug_no_wait, no_wait)
PRODUCT_KERNEL(bug_read_early, read_early)
PRODUCT_KERNEL(bug_no_fence, no_fence)
PRODUCT_KERNEL(bug_no_commit, no_commit)
PRODUCT_KERNEL(bug_written_early, written_early)
PRODUCT_KERNEL(bug_refilled, refilled)
PRODUCT_KERNEL(bug_stored, stored)
PRODUCT_KERNEL(bug_lanes_differ, lanes_differ)
PRODUCT_KERNEL(bug_warps_differ, warps_differ)
PRODUCT_KERNEL(bug_warp_missing, warp_missing)
PRODUCT_KERNEL(bug_misaligned, misaligned)
PRODUCT_KERNEL(bug_not_swizzled, not_swizzled)
PRODUCT_KERNEL(bug_outside, outside)
PRODUCT_KERNEL(bug_overlapping, overlapping)
PRODUCT_KERNEL(clean_stored_and_fenced, stored_and_fenced)
PRODUCT_KERNEL(clean_copied_and_fenced, copied_and_fenced)
PRODUCT_KERNEL(bug_fenced_first, fenced_first)
PRODUCT_KERNEL(bug_fenced_late, fenced_late)
PRODUCT_KERNEL(bug_fenced_by_another, fenced_by_another)
PRODUCT_KERNEL(bug_copy_fenced_early, copy_fenced_early)

// One tile as it lies in shared memory, `place` bytes behind its start.
extern "C" __global__ void one_tile(const __grid_constant__ wg::Tiles tiles, unsigned char* out, int along, int across, int inner,
                                    int outer, int bytes, int place) {
  __shared__ ac::Mbarrier full;
  WG_DYNAMIC_SHARED(shared);
  if (threadIdx.x == 0) {
    ac::mbarrier_init(&full, 1);
    ac::mbarrier_init_fence();
    ac::mbarrier_arrive_expect_bytes(&full, bytes);
    wg::fetch<1>(shared + place, tiles, along, across, inner, outer, &full, 1);
  }
  __syncthreads();
  ac::mbarrier_wait(&full, 0);
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = shared[place + i];
}

// Warps hand a number on: each waits for the one before it, and comes to the barrier of the next without waiting.
extern "C" __global__ void clean_turns(int* out) {
  __shared__ int number;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (threadIdx.x == 0) number = 1;
  __syncwarp();
  if (warp > 0) ac::named_barrier_sync(warp, 64);
  if (warp > 0 && threadIdx.x % 32 == 0) number = 2 * number + warp;
  __syncwarp();
  if (warp + 1 < warps) ac::named_barrier_arrive(warp + 1, 64);
  if (warp + 1 == warps && threadIdx.x % 32 == 0) out[0] = number;
}
extern "C" __global__ void bug_turn_of_nobody(int* out) {
  __shared__ int number;
  const int warp = threadIdx.x / 32;
  if (warp == 0 && threadIdx.x == 0) number = 1;
  if (warp == 1) ac::named_barrier_arrive(1, 64);
  if (warp == 1 && threadIdx.x == 32) out[0] = number;
  if (warp == 0) ac::named_barrier_arrive(1, 64);
}
extern "C" __global__ void bug_two_turns_at_once(int* out) {
  ac::named_barrier_arrive(1, 96);
  ac::named_barrier_arrive(1, 96);
  out[0] = 1;
}

// Warpgroups that ask for registers: of 384 threads each has 168 at first.
template <int Fewer, int More> __device__ __forceinline__ void registers(int* out) {
  if (threadIdx.x < 128) {
    wg::shrink_registers<Fewer>();
  } else {
    wg::grow_registers<More>();
  }
  if (threadIdx.x == 0) out[0] = 1;
}
extern "C" __global__ void clean_registers(int* out) { registers<88, 208>(out); }
extern "C" __global__ void bug_more_registers_than_there_are(int* out) { registers<96, 208>(out); }
extern "C" __global__ void bug_shrinks_to_more(int* out) { registers<176, 168>(out); }
extern "C" __global__ void bug_grows_to_fewer(int* out) { registers<88, 160>(out); }
