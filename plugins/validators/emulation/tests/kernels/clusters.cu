// Kernels for clusters of 4 blocks of 64 threads: out[i] = the sum over the blocks of the cluster of in at the same thread,
// computed by block (thread % 4) and written once per cluster: out [clusters][64].
#include <agentcompile/ptx.cuh>

namespace {
constexpr int threads = 64, blocks = 4;
enum class Cluster { clean, no_start_barrier, no_end_barrier, relaxed_end, exits_early, wrong_slot };

template <Cluster KIND>
__device__ __forceinline__ void sum_over_cluster(const float* in, float* out, float* parts) {
  const int thread = threadIdx.x, rank = static_cast<int>(ac::cluster_rank());
  if (KIND != Cluster::no_start_barrier) {
    ac::cluster_arrive_relaxed();
    ac::cluster_wait();
  }
  if (KIND == Cluster::exits_early && rank == 3) return;
  const int slot = KIND == Cluster::wrong_slot ? 0 : rank;
  ac::store_to_cluster(&parts[slot * threads + thread], static_cast<unsigned>(thread % blocks), in[blockIdx.x * threads + thread]);
  if (KIND == Cluster::relaxed_end) {
    ac::cluster_arrive_relaxed();
    ac::cluster_wait();
  } else if (KIND != Cluster::no_end_barrier) {
    ac::cluster_arrive_release();
    ac::cluster_wait();
  } else {
    __syncthreads();
  }
  if (thread % blocks != rank) return;
  float sum = 0.0f;
  for (int other = 0; other < blocks; ++other) sum += parts[other * threads + thread];
  out[blockIdx.x / blocks * threads + thread] = sum;
}
}  // namespace

#define CLUSTER_KERNEL(name, kind)                                       \
  extern "C" __global__ void name(const float* in, float* out) {         \
    __shared__ float parts[blocks * threads];                            \
    sum_over_cluster<kind>(in, out, parts);                              \
  }
CLUSTER_KERNEL(clean_cluster, Cluster::clean)
CLUSTER_KERNEL(bug_store_before_start, Cluster::no_start_barrier)
CLUSTER_KERNEL(bug_no_barrier_after_stores, Cluster::no_end_barrier)
CLUSTER_KERNEL(bug_relaxed_arrival, Cluster::relaxed_end)
CLUSTER_KERNEL(bug_block_exits_early, Cluster::exits_early)
CLUSTER_KERNEL(bug_one_slot_for_all, Cluster::wrong_slot)

extern "C" __global__ void clean_cluster_dynamic(const float* in, float* out) {
  AC_DYNAMIC_SHARED(float, parts);
  sum_over_cluster<Cluster::clean>(in, out, parts);
}
// Threads of one block wait twice, the others once.
extern "C" __global__ void bug_missing_arrival(const float* in, float* out) {
  ac::cluster_arrive_relaxed();
  ac::cluster_wait();
  if (ac::cluster_rank() == 1) {
    ac::cluster_arrive_relaxed();
    ac::cluster_wait();
  } else {
    __syncthreads();
    ac::cluster_wait();
  }
  out[threadIdx.x] = in[threadIdx.x];
}
