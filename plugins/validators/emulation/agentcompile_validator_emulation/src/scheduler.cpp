// Runs blocks and clusters until their threads have ended, failed or got stuck.
#include <algorithm>

#include "runtime.h"

namespace emu {

Options options;
Block block;
SharedRegion static_region, dynamic_region;
std::mt19937_64 random_source;
bool failed = false;
volatile bool in_runtime = true, deadline_passed = false;
char failure_text[1536];

// --- failures ------------------------------------------------------------------------------------------------------
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

// --- programmatic dependent launch, shared memory ------------------------------------------------------------------
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

// --- one block -----------------------------------------------------------------------------------------------------
void prepare_threads(dim3 grid, dim3 dim) {
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
  block.published_after = 0;
  for (NamedBarrier& barrier : block.named_barriers) barrier = NamedBarrier{};
  for (unsigned w = 0; w < block.warp_count; ++w) {
    const unsigned lanes = std::min(warp_lanes, block.thread_count - w * warp_lanes);
    block.warps[w].alive = block.warps[w].runnable = lanes == warp_lanes ? 0xffffffffu : (1u << lanes) - 1;
    block.warps[w].groups.clear();
    block.warps[w].products = Products{};
    block.warps[w].registers = 0;
  }
  for (Thread& thread : block.threads) {
    thread.block_index = index;
    thread.state = State::unstarted;
    thread.fiber = nullptr;
    thread.block_epoch = thread.warp_epoch = thread.time = 1;
    thread.fence_epoch = 0;
    thread.unfenced_writes = thread.dependency_waited = thread.parted = false;
    thread.cluster_arrivals = thread.cluster_waits = thread.cluster_seen = 0;
    thread.open_group.clear();
    thread.groups.clear();
    thread.proxy_fences.clear();
    thread.unpublished_stores.clear();
    thread.clocks_of_others.clear();
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
    return fail("deadlock: thread %u waits in a warp %s with mask 0x%08x for lanes that never arrive%s (%u threads at a block "
                "barrier, %u exited)",
                other->linear, name_of(other->collective), other->collective_mask, describe_other_groups(*other).c_str(),
                at_barrier, done);
  if (other && other->state == State::at_mbarrier)
    return fail("deadlock: thread %u waits for parity %u of %s (%u threads at a block barrier, %u exited)", other->linear,
                other->awaited_parity, describe_mbarrier(*other->awaited).c_str(), at_barrier, done);
  if (other && other->state == State::at_cluster_barrier)
    return fail("deadlock: thread %u of block (%u,%u,%u) waits at %s (%u threads at a block barrier, %u exited)", other->linear,
                block.index.x, block.index.y, block.index.z, describe_cluster_barrier().c_str(), at_barrier, done);
  if (other)
    return fail("deadlock: thread %u waits at named barrier %d, to which %zu of %d threads came", other->linear,
                other->named_barrier,
                block.named_barriers[other->named_barrier].waiting.size() + block.named_barriers[other->named_barrier].arrived.size(),
                block.named_barriers[other->named_barrier].expected);
  if (elsewhere)
    return fail("divergent __syncthreads: thread %u waits at line %u, thread %u at line %u", barrier_waiter->linear,
                barrier_waiter->barrier_site, elsewhere->linear, elsewhere->barrier_site);
  fail("divergent __syncthreads: %u threads exited while %u wait (thread %u at line %u)", done, at_barrier, barrier_waiter->linear,
       barrier_waiter->barrier_site);
}

// Runs the active block until its threads have ended (true) or wait for something outside the block, or failed.
static bool advance_block() {
  wake_cluster_waiters();
  let_remote_arrivals_count();
  if (!options.lazy_copies) land_all_messages();
  if (!options.lazy_copies) land_all_copies();
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

void run_cluster(uint3 first, dim3 grid) {
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
    if (complete_cluster_phase() || message_in_flight()) continue;
    activate_block(stuck);
    return report_stuck_block();
  }
  for (unsigned rank = 0; rank < size; ++rank) {
    activate_block(rank);
    check_no_copy_in_flight();
  }
}

}  // namespace emu
