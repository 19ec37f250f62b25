// A ring of slots in shared memory (sm_90): one warp, the producer, fills them in order by bulk copies while others empty them.
//
// Each slot has two barriers: `full` completes when the slot's bytes have landed, `empty` when all consumer warps are done with
// it. Producer and consumers each walk through the ring with a RingPosition of their own; nobody counts for the other.
#pragma once
#include <agentcompile/ptx.cuh>

namespace ac {

// A slot of the ring and the parity of its barriers' phase there.
template <int Slots> struct RingPosition {
  int slot = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == Slots) {
      slot = 0;
      parity ^= 1u;
    }
  }
};

template <class T, int Slots> struct Ring {
  using Position = RingPosition<Slots>;
  T* slots;         // in shared memory, aligned to 16 bytes; all slots have one size
  Mbarrier* full;   // Slots, in shared memory
  Mbarrier* empty;  // Slots, in shared memory

  // By one thread, before a barrier of the block.
  __device__ __forceinline__ void init(int consumer_warps) const {
    for (int slot = 0; slot < Slots; ++slot) {
      mbarrier_init(full + slot, 1);
      mbarrier_init(empty + slot, consumer_warps);
    }
    mbarrier_init_fence();
  }

  // A consumer: the slot's bytes are there.
  __device__ __forceinline__ void wait_full(const Position& position) const { mbarrier_wait(full + position.slot, position.parity); }

  // One lane of each consumer warp: its warp reads the slot no more.
  __device__ __forceinline__ void release(const Position& position) const { mbarrier_arrive(empty + position.slot); }

  // The producer, before it fills slot `next` for the `issued`-th time: at most InFlight slots are on their way, because
  // requests queued deeper only delay others, and the consumers are done with what the slot held. `lagging`: the slot filled
  // InFlight slots ago, which moves on here.
  template <int InFlight>
  __device__ __forceinline__ void acquire(const Position& next, Position& lagging, int issued) const {
    static_assert(InFlight <= Slots, "no more slots in flight than the ring has");
    if constexpr (InFlight < Slots) {
      if (issued >= InFlight) {
        wait_full(lagging);
        lagging.advance();
      }
    }
    if (issued >= Slots) mbarrier_wait(empty + next.slot, next.parity ^ 1u);
  }

  // All lanes of the producer, while no consumer looks at the ring: as if the first `issued` slots, filled once each, had not been asked
  // for. What is under way lands, and one more phase of each barrier ends, so that it has the parity of a new one.
  __device__ __forceinline__ void take_back(int issued, int lane) const {
    for (int slot = 0; slot < issued; ++slot) {
      mbarrier_wait(full + slot, 0);
      __syncwarp();  // no lane waits for the phase that ends here
      if (lane == 0) mbarrier_arrive(full + slot);
    }
  }
};

}  // namespace ac
