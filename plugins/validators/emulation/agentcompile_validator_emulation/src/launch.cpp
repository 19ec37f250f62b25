// The C interface for Python: one launch of a grid, its blocks or clusters one after another, under a deadline.
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "runtime.h"

extern "C" char __start_emu_shared __attribute__((weak, visibility("hidden")));
extern "C" char __stop_emu_shared __attribute__((weak, visibility("hidden")));

namespace emu {

struct LaunchRequest {  // mirrored by module.py
  const char* entry;
  unsigned grid[3], block[3];
  size_t dynamic_shared_bytes;
  void** arguments;
  const BufferSpec* buffers;
  int cluster;  // blocks of a cluster, along x
  int buffer_count, lane_order, warp_skewed, lazy_copies, checks, programmatic_launch;
  long preempt_per_million;
  unsigned long long seed;
  double deadline_s;
  char* stacks;  // one for every thread of a block or cluster
  size_t bytes_per_stack;
};

static std::map<std::string, KernelTrampoline>& kernels() {
  static std::map<std::string, KernelTrampoline> registered;
  return registered;
}
void register_kernel(const char* name, KernelTrampoline trampoline) { kernels()[name] = trampoline; }

// --- deadline: a timer's signal on this thread, so that a loop without any runtime call is stopped too -------------
static void on_deadline_signal(int) {
  deadline_passed = true;
  if (!in_runtime && current) fail_on_deadline();  // leaves the handler by switching to the scheduler's stack
}

class DeadlineTimer {
 public:
  explicit DeadlineTimer(double seconds) {
    deadline_passed = false;
    if (seconds <= 0) return;
    struct sigaction action = {};
    action.sa_handler = on_deadline_signal;
    action.sa_flags = SA_NODEFER | SA_RESTART;
    installed_ = sigaction(signal_number(), &action, &previous_) == 0;
    struct sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = signal_number();
    event._sigev_un._tid = pid_t(syscall(SYS_gettid));
    armed_ = timer_create(CLOCK_MONOTONIC, &event, &timer_) == 0;
    if (!armed_) return;
    struct itimerspec when = {};
    when.it_value.tv_sec = time_t(seconds);
    when.it_value.tv_nsec = long((seconds - double(time_t(seconds))) * 1e9) + 1;
    when.it_interval.tv_nsec = 20 * 1000 * 1000;  // again, in case the first came inside the runtime
    timer_settime(timer_, 0, &when, nullptr);
  }
  ~DeadlineTimer() {
    if (armed_) timer_delete(timer_);
    if (installed_) sigaction(signal_number(), &previous_, nullptr);
  }

 private:
  static int signal_number() { return SIGRTMIN + 9; }
  timer_t timer_ = {};
  struct sigaction previous_ = {};
  bool installed_ = false, armed_ = false;
};

// --- the grid ------------------------------------------------------------------------------------------------------
static bool accept(const LaunchRequest& request) {
  const unsigned* dim = request.block;
  const uint64_t threads = uint64_t(dim[0]) * dim[1] * dim[2];
  if (!kernels().count(request.entry))
    fail("the module has no kernel '%s'", request.entry);
  else if (threads == 0 || threads > max_threads)
    fail("a block of %llu threads: use 1 to %u", static_cast<unsigned long long>(threads), max_threads);
  else if (!request.grid[0] || !request.grid[1] || !request.grid[2])
    fail("an empty grid");
  else if (request.dynamic_shared_bytes > max_shared_bytes)
    fail("%zu bytes of dynamic shared memory: at most %u", request.dynamic_shared_bytes, max_shared_bytes);
  else if (request.cluster < 1 || request.cluster > int(max_cluster) || request.grid[0] % unsigned(request.cluster))
    fail("clusters of %d blocks in a grid of %u: use 1 to %u, dividing the grid", request.cluster, request.grid[0], max_cluster);
  return !failed;
}

// The first block of every cluster, in the order in which clusters run.
static std::vector<uint3> order_clusters(dim3 grid) {
  std::vector<uint3> order;
  order.reserve(size_t(grid.x) * grid.y * grid.z / cluster_size());
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; x += cluster_size()) order.push_back({x, y, z});
  if (options.order == LaneOrder::descending) std::reverse(order.begin(), order.end());
  if (options.order == LaneOrder::random) std::shuffle(order.begin(), order.end(), random_source);
  return order;
}

static void run_grid(const LaunchRequest& request) {
  const dim3 grid(request.grid[0], request.grid[1], request.grid[2]), dim(request.block[0], request.block[1], request.block[2]);
  static_region = {&__start_emu_shared, size_t(&__stop_emu_shared - &__start_emu_shared), "static shared memory"};
  set_stacks(request.stacks, request.bytes_per_stack);
  set_kernel(kernels()[request.entry], request.arguments);
  begin_cluster_launch(unsigned(request.cluster));
  for (unsigned rank = 0; rank < cluster_size(); ++rank) {
    activate_block(rank);
    prepare_threads(grid, dim);
    if (!allocate_dynamic_shared(request.dynamic_shared_bytes)) return fail("no memory for the dynamic shared memory");
  }
  begin_launch_checks(request.buffers, request.buffer_count);
  const DeadlineTimer timer(request.deadline_s);
  for (const uint3& first : order_clusters(grid)) {
    run_cluster(first, grid);
    current = nullptr;
    if (failed) break;
  }
  if (failed) discard_fibers();
  end_launch_checks();
}

}  // namespace emu

// The address of a variable by which the compiler guards a constructor.
extern "C" __attribute__((visibility("default"))) void emu_add_constructor_guard(const char* guard) { emu::add_constructor_guard(guard); }

// Returns 0, or 1 with a sentence in `error`. One launch at a time in the process: stacks and the deadline's signal are shared.
extern "C" __attribute__((visibility("default"))) int emu_launch(const emu::LaunchRequest* request, char* error,
                                                                 size_t error_bytes) {
  using namespace emu;
  failed = false;
  failure_text[0] = 0;
  current = nullptr;
  in_runtime = true;
  options.order = LaneOrder(request->lane_order);
  options.warp_skewed = request->warp_skewed;
  options.lazy_copies = request->lazy_copies;
  options.checks = request->checks;
  options.programmatic_launch = request->programmatic_launch;
  options.preempt_per_million = request->preempt_per_million;
  options.deadline_s = request->deadline_s;
  random_source.seed(request->seed);
  if (accept(*request)) run_grid(*request);
  snprintf(error, error_bytes, "%s", failure_text);
  return failed ? 1 : 0;
}
