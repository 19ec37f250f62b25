// Runs a grid: block after block, each until its threads have ended, failed or got stuck. Also the C interface for Python.
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "runtime.h"

extern "C" char __start_emu_shared __attribute__((weak, visibility("hidden")));
extern "C" char __stop_emu_shared __attribute__((weak, visibility("hidden")));

namespace emu {

Options options;
Block block;
SharedRegion static_region, dynamic_region;
std::mt19937_64 random_source;
bool failed = false;
volatile bool in_runtime = true, deadline_passed = false;
static char failure_text[1536];

struct LaunchRequest {  // mirrored by engine.py
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
  char* stacks;  // max_threads of them
  size_t bytes_per_stack;
};

static std::map<std::string, KernelTrampoline>& kernels() {
  static std::map<std::string, KernelTrampoline> registered;
  return registered;
}
void register_kernel(const char* name, KernelTrampoline trampoline) { kernels()[name] = trampoline; }

// --- failures -------------------------------------------------------------------------------------------------------------------
void fail(const char* format, ...) {
  in_runtime = true;
  if (!failed) {
    failed = true;
    int used = 0;
    if (const Thread* thread = self())
      used = snprintf(failure_text, sizeof failure_text, "block (%u,%u,%u) thread (%u,%u,%u): ", thread->block_index.x,
                      thread->block_index.y, thread->block_index.z, thread->thread_index.x, thread->thread_index.y,
                      thread->thread_index.z);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(failure_text + used, sizeof failure_text - size_t(used), format, arguments);
    va_end(arguments);
  }
  if (self()) abandon_thread();
}
void trap(const char* reason) {
  RuntimeScope scope;
  fail("%s", reason);
}
void fail_on_deadline() {
  if (!failed) fail("deadline: the launch did not end within %.3g s (a hang, or too much work)", options.deadline_s);
}

// --- deadline: a timer's signal on this thread, so that a loop without any runtime call is stopped too ------------------------------
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
    sigaction(signal_number(), &action, &previous_);
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
    if (!armed_) return;
    timer_delete(timer_);
    sigaction(signal_number(), &previous_, nullptr);
  }

 private:
  static int signal_number() { return SIGRTMIN + 9; }
  timer_t timer_ = {};
  struct sigaction previous_ = {};
  bool armed_ = false;
};

// --- programmatic dependent launch, shared memory -----------------------------------------------------------------------------------
void grid_dependency_wait() { self()->dependency_waited = true; }
void launch_dependents() {}
void* dynamic_shared() { return dynamic_region.low; }

static EMU_RAW void poison_shared_memory() {
#if EMU_ADDRESS_SANITIZER
  for (size_t i = 0; i < static_region.bytes; ++i)  // between static arrays lie the sanitizer's red zones
    if (!__asan_address_is_poisoned(static_region.low + i)) static_cast<volatile char*>(static_region.low)[i] = char(poison);
#else
  if (static_region.bytes) std::memset(static_region.low, poison, static_region.bytes);
#endif
  if (dynamic_region.bytes) std::memset(dynamic_region.low, poison, dynamic_region.bytes);
}

// --- one block --------------------------------------------------------------------------------------------------------------------
static void prepare_threads(dim3 grid, dim3 dim) {
  block.thread_count = dim.x * dim.y * dim.z;
  block.warp_count = (block.thread_count + warp_lanes - 1) / warp_lanes;
  if (block.threads.size() != block.thread_count) block.threads = std::vector<Thread>(block.thread_count);
  block.warps.resize(block.warp_count);
  for (unsigned i = 0; i < block.thread_count; ++i) {
    Thread& thread = block.threads[i];
    thread.thread_index = {i % dim.x, i / dim.x % dim.y, i / (dim.x * dim.y)};
    thread.block_dim = dim;
    thread.grid_dim = grid;
    thread.linear = i;
    thread.lane = i % warp_lanes;
    thread.warp = i / warp_lanes;
  }
}

static void start_block(uint3 index, dim3 grid) {
  block.index = index;
  block.linear = index.x + grid.x * (index.y + grid.y * index.z);
  block.mbarriers.clear();
  block.clocks_active = false;
  block.unfenced_writers = 0;
  block.barriers_published = true;
  for (NamedBarrier& barrier : block.named_barriers) barrier.waiting.clear();
  for (unsigned w = 0; w < block.warp_count; ++w) {
    const unsigned lanes = std::min(warp_lanes, block.thread_count - w * warp_lanes);
    block.warps[w].alive = block.warps[w].runnable = lanes == warp_lanes ? 0xffffffffu : (1u << lanes) - 1;
    block.warps[w].groups.clear();
  }
  for (Thread& thread : block.threads) {
    thread.block_index = index;
    thread.state = State::unstarted;
    thread.fiber = nullptr;
    thread.block_epoch = thread.warp_epoch = thread.time = 1;
    thread.fence_epoch = 0;
    thread.unfenced_writes = thread.dependency_waited = false;
    thread.cluster_arrivals = thread.cluster_waits = thread.cluster_seen = 0;
    thread.open_group.clear();
    thread.groups.clear();
    thread.unpublished_stores.clear();
  }
  poison_shared_memory();
  begin_block_checks();
  reset_run_order();
}

// Where the other lanes of a waiting thread's warp are.
static std::string describe_other_groups(const Thread& thread) {
  std::string text;
  for (const Warp::Group& group : warp_of(&thread).groups) {
    if (group.mask == thread.collective_mask && group.kind == thread.collective) continue;
    char part[100];
    snprintf(part, sizeof part, "; lanes 0x%08x are at a %s with mask 0x%08x", group.arrived, name_of(group.kind), group.mask);
    text += part;
  }
  return text;
}

static void report_stuck_block() {
  unsigned done = 0, at_barrier = 0;
  const Thread *barrier_waiter = nullptr, *elsewhere = nullptr, *other = nullptr;
  for (const Thread& thread : block.threads) {
    if (thread.state == State::done) ++done;
    else if (thread.state == State::at_block_barrier) {
      ++at_barrier;
      if (!barrier_waiter) barrier_waiter = &thread;
      else if (thread.barrier_site != barrier_waiter->barrier_site) elsewhere = &thread;
    } else if (!other) other = &thread;
  }
  if (other && other->state == State::in_warp_collective)
    return fail("deadlock: thread %u waits in a warp %s with mask 0x%08x for lanes that never arrive%s (%u threads at a block barrier, %u exited)",
                other->linear, name_of(other->collective), other->collective_mask, describe_other_groups(*other).c_str(), at_barrier, done);
  if (other && other->state == State::at_mbarrier)
    return fail("deadlock: thread %u waits for parity %u of %s (%u threads at a block barrier, %u exited)", other->linear,
                other->awaited_parity, describe_mbarrier(*other->awaited).c_str(), at_barrier, done);
  if (other && other->state == State::at_cluster_barrier)
    return fail("deadlock: thread %u of block (%u,%u,%u) waits at %s (%u threads at a block barrier, %u exited)", other->linear,
                block.index.x, block.index.y, block.index.z, describe_cluster_barrier().c_str(), at_barrier, done);
  if (other)
    return fail("deadlock: thread %u waits at named barrier %d, to which %zu of %d threads came", other->linear, other->named_barrier,
                block.named_barriers[other->named_barrier].waiting.size(), block.named_barriers[other->named_barrier].expected);
  if (elsewhere)
    return fail("divergent __syncthreads: thread %u waits at line %u, thread %u at line %u", barrier_waiter->linear,
                barrier_waiter->barrier_site, elsewhere->linear, elsewhere->barrier_site);
  fail("divergent __syncthreads: %u threads exited while %u wait (thread %u at line %u)", done, at_barrier, barrier_waiter->linear,
       barrier_waiter->barrier_site);
}

// Runs the active block until its threads have ended (true) or wait for something outside the block, or failed.
static bool advance_block() {
  wake_cluster_waiters();
  reset_run_order();
  for (;;) {
    run_until_nothing_is_runnable();
    if (failed) return false;
    bool all_done = true, all_at_one_barrier = true;
    const unsigned site = block.threads[0].barrier_site;
    for (const Thread& thread : block.threads) {
      all_done &= thread.state == State::done;
      all_at_one_barrier &= thread.state == State::at_block_barrier && thread.barrier_site == site;
    }
    if (all_done) return true;
    if (all_at_one_barrier) {
      release_block_barrier();
      reset_run_order();
    } else if (!land_one_copy()) {
      return false;
    }
  }
}

static void run_cluster(uint3 first, dim3 grid) {
  const unsigned size = cluster_size();
  begin_cluster();
  for (unsigned rank = 0; rank < size; ++rank) {
    activate_block(rank);
    start_block({first.x + rank, first.y, first.z}, grid);
  }
  for (;;) {
    unsigned ended = 0, stuck = 0;
    for (unsigned turn = 0; turn < size; ++turn) {
      const unsigned rank = options.order == LaneOrder::descending ? size - 1 - turn : turn;
      activate_block(rank);
      if (advance_block()) ++ended;
      else stuck = rank;
      if (failed) return;
    }
    if (ended == size) break;
    if (complete_cluster_phase()) continue;
    activate_block(stuck);
    return report_stuck_block();
  }
  for (unsigned rank = 0; rank < size; ++rank) {
    activate_block(rank);
    check_no_copy_in_flight();
  }
}

// --- one launch -------------------------------------------------------------------------------------------------------------------
static bool accept(const LaunchRequest& request) {
  const unsigned* dim = request.block;
  const uint64_t threads = uint64_t(dim[0]) * dim[1] * dim[2];
  if (!kernels().count(request.entry)) fail("the module has no kernel '%s'", request.entry);
  else if (threads == 0 || threads > max_threads) fail("a block of %llu threads: use 1 to %u", static_cast<unsigned long long>(threads), max_threads);
  else if (!request.grid[0] || !request.grid[1] || !request.grid[2]) fail("an empty grid");
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

// Returns 0, or 1 with a sentence in `error`. One launch at a time in the process: stacks and the deadline's signal are shared.
extern "C" __attribute__((visibility("default"))) int emu_launch(const emu::LaunchRequest* request, char* error, size_t error_bytes) {
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
