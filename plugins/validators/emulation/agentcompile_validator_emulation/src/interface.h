// What kernel code (compiled by g++ through shim.h and agentcompile/ptx.cuh) calls in the emulator's runtime.
// `site` names the place of a barrier by source line: the compiler may duplicate code, so a return address would not do.
#pragma once
#include <builtin_types.h>  // the real CUDA vector types: dim3, uint3, uint4

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace emu {

// The part of a thread that kernel code reads; the runtime's Thread derives from it.
struct ThreadCoordinates {
  uint3 thread_index;
  uint3 block_index;
  dim3 block_dim;
  dim3 grid_dim;
  unsigned linear, lane, warp;
};
extern ThreadCoordinates* current;  // the running thread; null while the scheduler runs

enum class Predicate : int { count, all, any };
enum class Reduction : int { add, min_signed, max_signed, min_unsigned, max_unsigned, bit_and, bit_or, bit_xor };

// --- barriers and warp collectives (collectives.cpp) ---
void block_barrier(unsigned site);
int block_barrier_reduce(unsigned site, int predicate, Predicate kind);
void named_barrier_sync(int id, int threads);
void named_barrier_arrive(int id, int threads);
void warp_barrier(unsigned mask);
uint64_t warp_shuffle(unsigned mask, uint64_t bits, int source_lane);
unsigned warp_ballot(unsigned mask, int predicate);
unsigned warp_match_any(unsigned mask, uint64_t bits);
unsigned warp_reduce(unsigned mask, unsigned value, Reduction kind);
unsigned active_mask();

// --- tensor cores (tensor_cores.cpp) ---
void ldmatrix_x4(unsigned (&fragment)[4], const void* shared_row, bool transposed);
void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]);
void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]);

// --- products of warpgroups (warpgroups.cpp) ---
struct WarpgroupProduct {  // of 16 terms: 64 rows by `columns`
  float* sums;
  const unsigned* rows;  // four words of this thread's, or null: in shared memory
  unsigned long long a, b;  // descriptors
  unsigned columns;
  bool half, adds, a_by_terms, b_by_terms;
};
unsigned shared_window_address(const void* shared);
void warpgroup_multiply(const WarpgroupProduct& product);
void warpgroup_fence();
void warpgroup_commit();
void warpgroup_wait(int pending_groups);
void warpgroup_settle(const float* sums);
void shrink_registers(int count);
void grow_registers(int count);
void proxy_fence();  // what threads store in shared memory is there for products

// --- copies and barriers that complete asynchronously (async_copies.cpp) ---
// `settled`: of data that a hint says is complete, allowed before the dependency wait
void cp_async(void* shared, const void* global, int bytes, int source_bytes, bool settled = false);
void cp_async_commit();
void cp_async_wait(int pending_groups);
void mbarrier_init(unsigned long long* barrier, int arrivals);
void mbarrier_init_fence();
void mbarrier_arrive(unsigned long long* barrier, unsigned expected_bytes);
void mbarrier_wait(unsigned long long* barrier, unsigned parity, bool of_cluster = false);
void bulk_copy(void* shared, const void* global, unsigned bytes, unsigned long long* barrier);

// --- tiles that the copy engine fetches (tiles.cpp) ---
// `blocks`: those of the cluster that get the tile, bit by bit; 0: this one
void fetch_tile(void* shared, const void* tiles, const int (&at)[4], unsigned long long* barrier, unsigned blocks);

// --- thread-block clusters (clusters.cpp) ---
unsigned cluster_rank();
void cluster_arrive(bool release);
void cluster_wait();
void store_to_cluster(float* shared, unsigned rank, float value);

// --- messages of a cluster (messages.cpp) ---
void send_to_cluster(float* shared, unsigned rank, float2 value, unsigned long long* barrier);
void arrive_in_cluster(unsigned long long* barrier, unsigned rank);

// --- programmatic dependent launch, memory (scheduler.cpp, memory_checks.cpp) ---
void grid_dependency_wait();
void launch_dependents();
void* dynamic_shared();
void require_aligned(const void* address, size_t bytes);
void device_fence();                                // __threadfence
void note_atomic(const void* address, size_t bytes);  // before every atomic operation on memory
void note_relaxed_load(const void* address, size_t bytes);
void note_settled_load(const void* address, size_t bytes);  // allowed before the dependency wait, checked otherwise
void trap(const char* reason);

using KernelTrampoline = void (*)(void** arguments);
void register_kernel(const char* name, KernelTrampoline trampoline);

constexpr unsigned shared_guard_bytes = 64;
void register_shared_guards(const char* before, const char* behind);

template <class T>
inline uint64_t to_bits(const T& value) {
  static_assert(sizeof(T) <= 8, "warp collectives move at most 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <class T>
inline T from_bits(uint64_t bits) {
  T value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(T));
  return value;
}

// Keeps template arguments of an atomic's operands from being deduced.
template <class T>
struct Identity {
  using type = T;
};
template <class T>
using identity_t = typename Identity<T>::type;

#define EMU_UNCHECKED __attribute__((no_sanitize("thread")))

template <class T>
EMU_UNCHECKED __attribute__((noinline)) T load_relaxed(const T* address) {
  note_relaxed_load(address, sizeof(T));
  T value;
  std::memcpy(static_cast<void*>(&value), address, sizeof(T));
  return value;
}

// A counter of the chain read before the dependency wait; blocks with an odd index see the value before its latest step.
EMU_UNCHECKED inline long long load_hint(const long long* address) {
  note_settled_load(address, sizeof(long long));
  return *static_cast<const volatile long long*>(address) - (current->block_index.x & 1);
}
// An index that an earlier kernel of the chain writes, read before the dependency wait. By the block's index: as it will be; one less;
// every other one with its lowest bit turned, which may be just beyond the last; or right in its lower half alone.
EMU_UNCHECKED inline long long load_unsettled(const long long* address) {
  note_settled_load(address, sizeof(long long));
  const long long value = *static_cast<const volatile long long*>(address);
  switch (current->block_index.x & 3) {
    case 0: return value;
    case 1: return value - 1;
    case 2: return value ^ (reinterpret_cast<uintptr_t>(address) >> 3 & 1);
    default: return value ^ 1LL << 32;
  }
}
EMU_UNCHECKED inline uint4 load_settled16(const void* address) {
  note_settled_load(address, sizeof(uint4));
  uint4 value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

}  // namespace emu
