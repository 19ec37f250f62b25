// The least that copies in bulk and is right: one warp, one copy into shared memory, one wait, one read.
#include <agentcompile/ptx.cuh>
extern "C" __global__ void bulk_control_b01kc0de(const float* in0, const float* in1, float* out) {
  alignas(128) __shared__ float staged[128];
  __shared__ ac::Mbarrier full;
  if (threadIdx.x == 0) {
    ac::mbarrier_init(&full, 1);
    ac::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ac::mbarrier_arrive_expect_bytes(&full, sizeof(staged));
    ac::bulk_copy_to_shared(staged, in0, sizeof(staged), &full);
  }
  ac::mbarrier_wait(&full, 0);
  for (int i = threadIdx.x; i < 128; i += 32) out[i] = staged[i] + in1[i];
}
