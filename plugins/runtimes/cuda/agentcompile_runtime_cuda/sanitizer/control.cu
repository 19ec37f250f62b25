// The least that fills a slot by bulk copies again and again and is right. Warp 1 fills, warp 0 empties, as in agentcompile/ring.cuh: once all
// lanes have read, one of them releases the slot. racecheck (2025.3) does not carry the warp's barrier over to that arrival, so it
// reports the next copy against the reads of the other 31 lanes.
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>
constexpr int slot_elements = 64;
constexpr int rounds = 2;
extern "C" __global__ void bulk_control_b01kc0de(const float* in0, const float* in1, float* out) {
  alignas(128) __shared__ float slot[slot_elements];
  __shared__ ac::Mbarrier full;
  __shared__ ac::Mbarrier empty;
  if (threadIdx.x == 0) {
    ac::mbarrier_init(&full, 1);
    ac::mbarrier_init(&empty, 1);
    ac::mbarrier_init_fence();
  }
  __syncthreads();
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    const int first = round * slot_elements;
    if (threadIdx.x == ac::warp_size) {
      if (round > 0) ac::mbarrier_wait(&empty, (round - 1) & 1);
      ac::mbarrier_arrive_expect_bytes(&full, sizeof(slot));
      ac::bulk_copy_to_shared(slot, in0 + first, sizeof(slot), &full);
    } else if (threadIdx.x < ac::warp_size) {
      ac::mbarrier_wait(&full, round & 1);
      for (int i = threadIdx.x; i < slot_elements; i += ac::warp_size) out[first + i] = slot[i] + in1[first + i];
      __syncwarp();
      if (threadIdx.x == 0) ac::mbarrier_arrive(&empty);
    }
  }
}
