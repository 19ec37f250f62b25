// Kernels for clusters of 4 blocks of 64 threads that send each other pairs: out[i] = the sum over the blocks of the cluster of in
// at the same place, pair p computed by block p % 4 and written once per cluster: out [clusters][64].
#include <agentcompile/ptx.cuh>

namespace {
constexpr int width = 64, blocks = 4, pair_bytes = 8;
enum class Message {
  clean, no_start_barrier, no_init, no_init_fence, fence_after_barrier, exits_early, no_wait, wait_of_block, wait_in_part, early_expect,
  less_expected, more_expected, one_slot, misaligned, not_shared, onto_barrier, nobody_waits, lanes_parted
};

// Compiled once for all kinds.
__device__ __noinline__ void sum_by_messages(Message kind, const float* in, float* out, float* parts, ac::Mbarrier* arrived) {
  const int thread = threadIdx.x, rank = static_cast<int>(ac::cluster_rank());
  const unsigned bytes = blocks * (width / 2 / blocks) * pair_bytes;
  if (thread == 0 && (kind != Message::no_init || rank == 1)) {
    ac::mbarrier_init(arrived, 1);
    if (kind != Message::no_init_fence && kind != Message::fence_after_barrier) ac::mbarrier_init_fence();
  }
  if (kind != Message::lanes_parted) __syncwarp();
  if (kind == Message::early_expect && thread == 0) ac::mbarrier_arrive_expect_bytes(arrived, bytes);
  if (kind != Message::no_start_barrier) {
    ac::cluster_arrive_relaxed();
    ac::cluster_wait();
  }
  if (kind == Message::fence_after_barrier && thread == 0) ac::mbarrier_init_fence();
  __syncthreads();
  if (kind == Message::exits_early && rank == 3) return;
  if (thread < width / 2) {
    const float2 pair = make_float2(in[blockIdx.x * width + 2 * thread], in[blockIdx.x * width + 2 * thread + 1]);
    float* slot = &parts[(kind == Message::one_slot ? 0 : rank) * width + 2 * thread];
    if (kind == Message::misaligned) slot += 1;
    if (kind == Message::not_shared) slot = out;
    if (kind == Message::onto_barrier) slot = reinterpret_cast<float*>(arrived);
    ac::send_to_cluster(slot, static_cast<unsigned>(thread % blocks), pair, arrived);
  }
  if (kind != Message::early_expect && thread == 0) {  // messages may have come before
    const int more = kind == Message::less_expected ? -1 : kind == Message::more_expected ? 1 : 0;
    ac::mbarrier_arrive_expect_bytes(arrived, bytes + more * pair_bytes);
  }
  if (kind == Message::nobody_waits) return;
  if (kind == Message::wait_of_block) ac::mbarrier_wait(arrived, 0);
  else if (kind != Message::no_wait && (kind != Message::wait_in_part || thread % 32 == 0)) ac::mbarrier_wait_cluster(arrived, 0);
  if (thread / 2 % blocks != rank) return;
  float sum = 0.0f;
  for (int other = 0; other < blocks; ++other) sum += parts[other * width + thread];
  out[blockIdx.x / blocks * width + thread] = sum;
}
}  // namespace

#define MESSAGE_KERNEL(name, kind)                                \
  extern "C" __global__ void name(const float* in, float* out) {  \
    __shared__ __align__(16) float parts[(blocks + 1) * width];   \
    __shared__ ac::Mbarrier arrived;                              \
    sum_by_messages(kind, in, out, parts, &arrived);              \
  }
MESSAGE_KERNEL(clean_messages, Message::clean)
MESSAGE_KERNEL(clean_early_expect, Message::early_expect)
MESSAGE_KERNEL(bug_before_start, Message::no_start_barrier)
MESSAGE_KERNEL(bug_no_init, Message::no_init)
MESSAGE_KERNEL(bug_no_init_fence, Message::no_init_fence)
MESSAGE_KERNEL(bug_fence_after_barrier, Message::fence_after_barrier)
MESSAGE_KERNEL(bug_exits_early, Message::exits_early)
MESSAGE_KERNEL(bug_no_wait, Message::no_wait)
MESSAGE_KERNEL(bug_wait_of_block, Message::wait_of_block)
MESSAGE_KERNEL(bug_one_thread_waits, Message::wait_in_part)
MESSAGE_KERNEL(bug_less_expected, Message::less_expected)
MESSAGE_KERNEL(bug_more_expected, Message::more_expected)
MESSAGE_KERNEL(bug_one_slot, Message::one_slot)
MESSAGE_KERNEL(bug_misaligned, Message::misaligned)
MESSAGE_KERNEL(bug_not_shared, Message::not_shared)
MESSAGE_KERNEL(bug_onto_barrier, Message::onto_barrier)
MESSAGE_KERNEL(bug_nobody_waits, Message::nobody_waits)
MESSAGE_KERNEL(bug_lanes_parted, Message::lanes_parted)

extern "C" __global__ void clean_messages_dynamic(const float* in, float* out) {
  AC_DYNAMIC_SHARED(float, parts);
  sum_by_messages(Message::clean, in, out, parts, reinterpret_cast<ac::Mbarrier*>(parts + blocks * width));
}
