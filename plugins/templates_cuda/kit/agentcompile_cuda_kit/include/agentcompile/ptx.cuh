// The only file with inline PTX, with ptx_cluster.cuh, which it includes. Everything that the CPU emulator must replace is declared
// here, once for the GPU and once (under CUDA_EMU) as a call into the emulator, so that kernels compile unchanged by NVRTC, nvcc
// and g++.
//
// Architectures: cp.async, ldmatrix and mma need sm_80. Bulk copies and mbarriers need sm_90: on an older GPU they trap, so a
// schedule that uses them must not be offered there. The programmatic-dependency calls do nothing below sm_90.
// Pointers to shared memory are ordinary (generic) pointers everywhere.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define AC_HAS_BULK_COPY 1
#else
#define AC_HAS_BULK_COPY 0
#endif

namespace ac {
// A barrier object in shared memory on which threads and bulk copies arrive. Declare it `__shared__ ac::Mbarrier full[N];`.
using Mbarrier = unsigned long long;
}  // namespace ac

#ifdef CUDA_EMU

// Declares `T* name`, the start of the block's dynamic shared memory (aligned to at least 128 bytes).
#define AC_DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(::emu::dynamic_shared())

namespace ac {
inline void grid_dependency_wait() { ::emu::grid_dependency_wait(); }
inline void launch_dependents() { ::emu::launch_dependents(); }

inline void cp_async16(void* shared, const void* global) { ::emu::cp_async(shared, global, 16, 16); }
inline void cp_async16_zero_fill(void* shared, const void* global, bool valid) {
  ::emu::cp_async(shared, global, 16, valid ? 16 : 0);
}
template <int OFFSET, bool SETTLED>
inline void cp_async16_zero_fill_from(void* shared, const void* global, bool valid) {
  ::emu::cp_async(shared, static_cast<const char*>(global) + OFFSET, 16, valid ? 16 : 0, SETTLED);
}
inline void cp_async_commit() { ::emu::cp_async_commit(); }
template <int PENDING>
inline void cp_async_wait() { ::emu::cp_async_wait(PENDING); }

inline void mbarrier_init(Mbarrier* barrier, int arrivals) { ::emu::mbarrier_init(barrier, arrivals); }
inline void mbarrier_init_fence() { ::emu::mbarrier_init_fence(); }
inline void mbarrier_arrive(Mbarrier* barrier) { ::emu::mbarrier_arrive(barrier, 0); }
inline void mbarrier_arrive_expect_bytes(Mbarrier* barrier, unsigned bytes) { ::emu::mbarrier_arrive(barrier, bytes); }
inline void mbarrier_wait(Mbarrier* barrier, unsigned parity) { ::emu::mbarrier_wait(barrier, parity); }
inline void bulk_copy_to_shared(void* shared, const void* global, unsigned bytes, Mbarrier* barrier) {
  ::emu::bulk_copy(shared, global, bytes, barrier);
}
inline void bulk_copy_to_shared_evict_first(void* shared, const void* global, unsigned bytes, Mbarrier* barrier) {
  ::emu::bulk_copy(shared, global, bytes, barrier);
}

inline float greater_or_nan(float a, float b) { return a != a || (a == b ? !(__float_as_int(a) < 0) : a > b) ? a : b; }
inline float smaller_or_nan(float a, float b) { return a != a || (a == b ? __float_as_int(a) < 0 : a < b) ? a : b; }
inline float quick_exp(float x) { return expf(x); }
inline float quick_exp2(float x) { return exp2f(x); }
inline float quick_reciprocal(float x) { return 1.0f / x; }

inline void named_barrier_sync(int id, int threads) { ::emu::named_barrier_sync(id, threads); }
inline void named_barrier_arrive(int id, int threads) { ::emu::named_barrier_arrive(id, threads); }

inline uint4 load_stream16(const void* global) {
  ::emu::require_aligned(global, 16);
  return *static_cast<const uint4*>(global);
}
template <int Words>
inline void load_stream(unsigned (&words)[Words], const void* global) {
  ::emu::require_aligned(global, Words * 4);
  for (int w = 0; w < Words; ++w) words[w] = static_cast<const unsigned*>(global)[w];
}
template <class T>
inline T load_relaxed(const T* global) { return ::emu::load_relaxed(global); }
// In odd blocks the hint is stale by one.
inline long long load_hint(const long long* global) { return ::emu::load_hint(global); }
inline uint4 load_settled16(const void* global) { return ::emu::load_settled16(global); }
// Right in every fourth block alone; what others see is in the emulator.
inline long long load_unsettled(const long long* global) { return ::emu::load_unsettled(global); }

inline void ldmatrix_x4(unsigned (&fragment)[4], const void* shared_row) { ::emu::ldmatrix_x4(fragment, shared_row, false); }
inline void ldmatrix_x4_transposed(unsigned (&fragment)[4], const void* shared_row) {
  ::emu::ldmatrix_x4(fragment, shared_row, true);
}
inline unsigned movmatrix_transposed(unsigned pair) {
  const int lane = static_cast<int>(::emu::current->lane), row = lane / 4, column = lane % 4;
  unsigned halves[2];
  for (int i = 0; i < 2; ++i) {
    const auto found = static_cast<unsigned>(::emu::warp_shuffle(0xffffffffu, pair, (2 * column + i) * 4 + row / 2));
    halves[i] = found >> row % 2 * 16 & 0xffffu;
  }
  return halves[0] | halves[1] << 16;
}
inline void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  ::emu::mma_m16n8k16_f16(d, a, b);
}
inline void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  ::emu::mma_m16n8k16_bf16(d, a, b);
}
}  // namespace ac

#else  // the GPU

#define AC_DYNAMIC_SHARED(T, name)                                       \
  extern __shared__ __align__(128) unsigned char ac_dynamic_shared_bytes[]; \
  T* name = reinterpret_cast<T*>(ac_dynamic_shared_bytes)

namespace ac {
__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// --- programmatic dependent launch ------------------------------------------------------------------------------------------
// Every thread of every block waits before it reads anything that an earlier kernel of the chain wrote, or writes, or exits.
__device__ __forceinline__ void grid_dependency_wait() {
#if AC_HAS_BULK_COPY
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel of the chain start its preamble.
__device__ __forceinline__ void launch_dependents() {
#if AC_HAS_BULK_COPY
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// --- cp.async: 16 bytes per thread, both addresses aligned to 16 ------------------------------------------------------------
__device__ __forceinline__ void cp_async16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
// Writes zeros (and reads nothing) where `valid` is false.
__device__ __forceinline__ void cp_async16_zero_fill(void* shared, const void* global, bool valid) {
  const int source_bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(source_bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING of this thread's newest groups are still in flight.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// --- mbarrier and 1-D bulk copies (sm_90) -----------------------------------------------------------------------------------
__device__ __forceinline__ void mbarrier_init(Mbarrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Once, by the initialising thread after its last mbarrier_init and before the __syncthreads that publishes the barriers.
__device__ __forceinline__ void mbarrier_init_fence() {
#if AC_HAS_BULK_COPY
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* barrier) {
#if AC_HAS_BULK_COPY
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#else
  __trap();
#endif
}
// Arrives once and announces `bytes` that bulk copies will deliver in this phase. Call it before issuing the copies.
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(Mbarrier* barrier, unsigned bytes) {
#if AC_HAS_BULK_COPY
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
#else
  __trap();
#endif
}
// Waits until the phase of this parity (0 for the first phase, then 1, 0, ...) is complete: all arrivals and all bytes.
__device__ __forceinline__ void mbarrier_wait(Mbarrier* barrier, unsigned parity) {
#if AC_HAS_BULK_COPY
  const unsigned address = shared_address(barrier);
  unsigned complete = 0;
  while (!complete) {
    asm volatile(
        "{\n\t"
        ".reg .pred complete;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, complete;\n\t"
        "}"
        : "=r"(complete)
        : "r"(address), "r"(parity)
        : "memory");
  }
#else
  __trap();
#endif
}
// One thread copies `bytes` contiguous bytes; the barrier receives them. Addresses aligned to 16, bytes a multiple of 16.
__device__ __forceinline__ void bulk_copy_to_shared(void* shared, const void* global, unsigned bytes, Mbarrier* barrier) {
#if AC_HAS_BULK_COPY
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#else
  __trap();
#endif
}
// The same, marking the lines as the first to leave L2: for weights, which a decode step reads once.
__device__ __forceinline__ void bulk_copy_to_shared_evict_first(void* shared, const void* global, unsigned bytes,
                                                                Mbarrier* barrier) {
#if AC_HAS_BULK_COPY
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#else
  __trap();
#endif
}

// --- arithmetic -------------------------------------------------------------------------------------------------------------
// The greater and the smaller of two, NaN where either is; +0 is greater than -0. One instruction.
__device__ __forceinline__ float greater_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float smaller_or_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
// exp(x) for results of 16 bits: two instructions; errs by 2^-22 and by |x| 2^-23, below 2^-126 it is 0.
__device__ __forceinline__ float quick_exp(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
  return result;
}
// 2^x in one instruction; errs by 2^-22, as exp2f does, which takes six; below 2^-126 it is 0.
__device__ __forceinline__ float quick_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x for x of at least 2^-126 and below 2^126: one instruction; errs by 2^-23. Beyond it is 0.
__device__ __forceinline__ float quick_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Barrier `id` (1 to 15) for the first `threads` threads (a multiple of 32) that come to it.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Comes to it without waiting for the others.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- global loads -----------------------------------------------------------------------------------------------------------
// Coherent load of 1, 2 or 4 words that leaves L1 alone: for weights. Volatile, so that it is issued where it is written.
template <int Words> __device__ __forceinline__ void load_stream(unsigned (&words)[Words], const void* global) {
  static_assert(Words == 1 || Words == 2 || Words == 4, "load_stream takes 4, 8 and 16 bytes");
  if constexpr (Words == 1) {
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(words[0]) : "l"(global));
  } else if constexpr (Words == 2) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(global));
  } else {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(global));
  }
}
__device__ __forceinline__ uint4 load_stream16(const void* global) {
  unsigned words[4];
  load_stream(words, global);
  return make_uint4(words[0], words[1], words[2], words[3]);
}
// Load (4, 8 or 16 bytes) that is never served from a stale line: for what other blocks of the same launch wrote before a fence.
template <class T>
__device__ __forceinline__ T load_relaxed(const T* global) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "load_relaxed takes 4-, 8- and 16-byte types");
  if constexpr (sizeof(T) == 4) {
    unsigned bits;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(global) : "memory");
    return *reinterpret_cast<T*>(&bits);
  } else if constexpr (sizeof(T) == 16) {
    uint4 bits;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w) : "l"(global) : "memory");
    return *reinterpret_cast<T*>(&bits);
  } else {
    unsigned long long bits;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(bits) : "l"(global) : "memory");
    return *reinterpret_cast<T*>(&bits);
  }
}

// A counter that kernels of this chain advance, read before the dependency wait: it may be stale, so what is decided by it
// must be decided again after the wait. What was complete when the counter got this value is visible after the load.
__device__ __forceinline__ long long load_hint(const long long* global) {
  long long value;
  asm volatile("ld.acquire.gpu.global.s64 %0, [%1];" : "=l"(value) : "l"(global) : "memory");
  return value;
}
// cp_async16_zero_fill from OFFSET bytes behind `global`, which are part of the instruction: an addition of its own would take two, and
// registers. `SETTLED`: of data that a hint says is complete. This, load_settled16 and load_unsettled are the only loads of chain-written
// data that are allowed before the wait.
template <int OFFSET, bool SETTLED>
__device__ __forceinline__ void cp_async16_zero_fill_from(void* shared, const void* global, bool valid) {
  const int source_bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1 + %3], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(source_bytes),
               "n"(OFFSET)
               : "memory");
}
// load_stream16 of data that a hint says is complete.
__device__ __forceinline__ uint4 load_settled16(const void* global) { return load_stream16(global); }
// An index that an earlier kernel of this chain writes, read before the dependency wait though nobody says that it is complete: anything
// that ever lay in that memory. It may choose what is asked for ahead, inside its range; what is computed takes the index read after the wait.
__device__ __forceinline__ long long load_unsettled(const long long* global) { return load_relaxed(global); }

// --- tensor cores -----------------------------------------------------------------------------------------------------------
// Loads four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8 (16-byte aligned).
__device__ __forceinline__ void ldmatrix_x4(unsigned (&fragment)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared_address(shared_row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_transposed(unsigned (&fragment)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared_address(shared_row))
               : "memory");
}
// Turns an 8x8 matrix of 16-bit elements, of which lane i holds element 2 (i % 4) and the next one of row i / 4; of the result likewise.
__device__ __forceinline__ unsigned movmatrix_transposed(unsigned pair) {
  unsigned turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}
// d += a * b for a [16 x 16] row-major and b [16 x 8] column-major fragment, accumulated in fp32.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
}  // namespace ac

#endif  // CUDA_EMU

#include <agentcompile/ptx_cluster.cuh>

namespace ac {
// Chooses the tensor-core instruction by element type: mma_m16n8k16<__half>(d, a, b).
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]);
template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  mma_m16n8k16_f16(d, a, b);
}
template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  mma_m16n8k16_bf16(d, a, b);
}
}  // namespace ac
