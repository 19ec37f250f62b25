// Inline PTX for thread-block clusters (sm_90): barriers, stores and messages between the shared memories of their blocks. Include
// ptx.cuh, which includes this. Below sm_90 everything but cluster_rank() traps, so a schedule with clusters is not offered there.
//
// All threads of the cluster's blocks that have not exited take part in arrive and wait. A block's shared memory may be
// written by others only between its arrival at the first barrier and their arrival at the last; by messages, until its wait for
// their mbarrier ends.
#pragma once

#ifdef CUDA_EMU

namespace ac {
inline unsigned cluster_rank() { return ::emu::cluster_rank(); }
inline void cluster_arrive_relaxed() { ::emu::cluster_arrive(false); }
inline void cluster_arrive_release() { ::emu::cluster_arrive(true); }
inline void cluster_wait() { ::emu::cluster_wait(); }
inline void store_to_cluster(float* shared, unsigned rank, float value) { ::emu::store_to_cluster(shared, rank, value); }
inline void send_to_cluster(float* shared, unsigned rank, float2 value, Mbarrier* barrier) {
  ::emu::send_to_cluster(shared, rank, value, barrier);
}
inline void mbarrier_wait_cluster(Mbarrier* barrier, unsigned parity) { ::emu::mbarrier_wait(barrier, parity, true); }
}  // namespace ac

#else  // the GPU

namespace ac {
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
#if AC_HAS_BULK_COPY
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if AC_HAS_BULK_COPY
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
  __trap();
#endif
}
// Publishes what this thread stored to the other blocks of the cluster, to those that wait.
__device__ __forceinline__ void cluster_arrive_release() {
#if AC_HAS_BULK_COPY
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#else
  __trap();
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if AC_HAS_BULK_COPY
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __trap();
#endif
}
// Stores to the variable of block `rank` of the cluster that lies where `shared` lies in this block.
__device__ __forceinline__ void store_to_cluster(float* shared, unsigned rank, float value) {
#if AC_HAS_BULK_COPY
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(shared)), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
#else
  __trap();
#endif
}
// Sends a pair to the variable of block `rank` (this one included) that lies where `shared` (aligned to 8) lies in this block, and
// 8 bytes to its barrier that lies where `barrier` lies here. That block expects them (mbarrier_arrive_expect_bytes, before or after
// they come), waits with mbarrier_wait_cluster, and has not exited; a cluster barrier lies between its mbarrier_init_fence and this.
// Needs no fence, orders no other access of the sender, and the sender may exit before it arrives.
__device__ __forceinline__ void send_to_cluster(float* shared, unsigned rank, float2 value, Mbarrier* barrier) {
#if AC_HAS_BULK_COPY
  unsigned remote, remote_barrier;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(shared)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(remote), "f"(value.x),
               "f"(value.y), "r"(remote_barrier)
               : "memory");
#else
  __trap();
#endif
}
// As mbarrier_wait, for a barrier that counts messages: what other blocks sent is visible after it.
__device__ __forceinline__ void mbarrier_wait_cluster(Mbarrier* barrier, unsigned parity) {
#if AC_HAS_BULK_COPY
  const unsigned address = shared_address(barrier);
  unsigned complete = 0;
  while (!complete) {
    asm volatile(
        "{\n\t"
        ".reg .pred complete;\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%1], %2;\n\t"
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
}  // namespace ac

#endif  // CUDA_EMU
