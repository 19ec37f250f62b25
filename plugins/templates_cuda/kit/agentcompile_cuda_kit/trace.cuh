// What a traced kernel notes: when each block passes its phases, in nanoseconds of the device's clock. Given to a source by tracing.py,
// which includes it before anything else and puts a TracedBlock at the start of every kernel.
//
// A name of the device library that waits is replaced by one that waits and then notes the time, so that kernels and their headers stay
// as they are. Layout: agentcompile_trace[entry][block][phase]; a phase that a block did not pass keeps what it was.
#pragma once
#include <agentcompile/ptx.cuh>

#ifdef CUDA_EMU
#define AC_TRACE_SEEN __attribute__((visibility("default")))
#else
#define AC_TRACE_SEEN
#endif
extern "C" {
AC_TRACE_SEEN __device__ unsigned long long agentcompile_trace[AC_TRACE_ENTRIES * AC_TRACE_BLOCKS * AC_TRACE_PHASES];
}

namespace ac {

enum TracePhase { trace_start, trace_released, trace_first, trace_last, trace_merged, trace_end };
static_assert(trace_end + 1 == AC_TRACE_PHASES, "tracing.py names as many phases");

__device__ __forceinline__ unsigned long long trace_clock() {
#ifdef CUDA_EMU
  static unsigned long long ticks = 0;
  return ++ticks;
#else
  unsigned long long nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds)::"memory");
  return nanoseconds;
#endif
}

__device__ __forceinline__ unsigned trace_block() { return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z); }

__device__ __forceinline__ unsigned long long* trace_place(int entry, TracePhase phase) {
  return agentcompile_trace + (static_cast<unsigned long long>(entry) * AC_TRACE_BLOCKS + trace_block()) * AC_TRACE_PHASES + phase;
}

// One lane of those that come here together; nobody waits for what it notes. Clocks only grow, so the latest of a launch is above all of
// the launch before, and the start of a block has set the places of what is earliest to the largest number.
__device__ __forceinline__ bool trace_notes(unsigned thread) {
  return trace_block() < AC_TRACE_BLOCKS && thread % 32 == static_cast<unsigned>(__ffs(__activemask()) - 1);
}
__device__ __forceinline__ unsigned trace_thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

__device__ __forceinline__ void trace_latest(int entry, TracePhase phase) {
  if (trace_notes(trace_thread())) atomicMax(trace_place(entry, phase), trace_clock());
}
__device__ __forceinline__ void trace_earliest(int entry, TracePhase phase) {
  if (trace_notes(trace_thread())) atomicMin(trace_place(entry, phase), trace_clock());
}

// In front of everything that a kernel does, and behind it in every thread, wherever it returns.
template <int Entry> struct TracedBlock {
  __device__ __forceinline__ TracedBlock() {
    if (threadIdx.x + threadIdx.y + threadIdx.z == 0 && trace_block() < AC_TRACE_BLOCKS) {
      *trace_place(Entry, trace_released) = ~0ull;
      *trace_place(Entry, trace_first) = ~0ull;
      *trace_place(Entry, trace_start) = trace_clock();
    }
  }
  __device__ __forceinline__ ~TracedBlock() { trace_latest(Entry, trace_end); }
};

#if AC_TRACE_ENTRIES == 1  // of several kernels nobody could say which one waits
__device__ __forceinline__ void traced_dependency_wait() {
  grid_dependency_wait();
  trace_earliest(0, trace_released);  // a warp that only fetches waits at its end
}
__device__ __forceinline__ void traced_mbarrier_wait(Mbarrier* barrier, unsigned parity) {
  mbarrier_wait(barrier, parity);
  if (trace_thread() >= 32) return;  // the first warp stands for those that consume: notes of all would slow them down
  if (parity == 0) trace_earliest(0, trace_first);
  trace_latest(0, trace_last);
}
__device__ __forceinline__ void traced_mbarrier_wait_cluster(Mbarrier* barrier, unsigned parity) {
  mbarrier_wait_cluster(barrier, parity);
  trace_latest(0, trace_merged);
}
__device__ __forceinline__ void traced_cluster_wait() {
  cluster_wait();
  trace_latest(0, trace_merged);
}
#define grid_dependency_wait traced_dependency_wait
#define mbarrier_wait traced_mbarrier_wait
#define mbarrier_wait_cluster traced_mbarrier_wait_cluster
#define cluster_wait traced_cluster_wait
#endif

}  // namespace ac
