// Block barriers, named barriers and warp collectives, with the mistakes that a GPU answers with a hang or a wrong value.
#include <algorithm>

#include "runtime.h"

namespace emu {

const char* name_of(Collective kind) {
  switch (kind) {
    case Collective::shuffle: return "shuffle";
    case Collective::ballot: return "vote";
    case Collective::match: return "match";
    case Collective::barrier: return "__syncwarp";
    case Collective::reduce: return "reduction";
    case Collective::tensor_core: return "mma";
    case Collective::ldmatrix: return "ldmatrix";
    case Collective::warpgroup: return "wgmma step";
  }
  return "collective";
}

// --- vector clocks: only for blocks that order threads by something finer than block and warp barriers -------------
size_t clock_entries() { return block.thread_count + max_mbarriers + block.warp_count; }
void activate_clocks() {
  if (block.clocks_active || !options.checks) return;
  block.clocks_active = true;
  for (Thread& thread : block.threads) thread.clock.assign(clock_entries(), 0);
}

void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

void release_to(Clock& into, Thread* from) {
  if (!block.clocks_active) return;
  from->clock[from->linear] = from->time;
  join(into, from->clock);
  ++from->time;
}

void acquire_from(const Clock& from, Thread* into) {
  if (block.clocks_active) join(into->clock, from);
}

// All of `threads` (a range of pointers) learn what any of them knows.
template <class Threads>
static void join_all(const Threads& threads) {
  if (!block.clocks_active) return;
  Clock everyone;
  for (Thread* thread : threads) release_to(everyone, thread);
  for (Thread* thread : threads) thread->clock = everyone;
}

// --- block barriers ------------------------------------------------------------------------------------------------
static void wait_at_block_barrier(unsigned site, int reduce_kind, int operand) {
  Thread* thread = self();
  thread->state = State::at_block_barrier;
  thread->barrier_site = site;
  thread->reduce_kind = reduce_kind;
  thread->reduce_operand = operand;
  warp_of(thread).runnable &= ~(1u << thread->lane);
  suspend();
}
void block_barrier(unsigned site) {
  RuntimeScope scope;
  wait_at_block_barrier(site, -1, 0);
}
int block_barrier_reduce(unsigned site, int predicate, Predicate kind) {
  RuntimeScope scope;
  wait_at_block_barrier(site, int(kind), predicate != 0);
  return self()->reduce_result;
}

// Called by the scheduler when every thread of the block waits at the same barrier.
void release_block_barrier() {
  int holds = 0;
  uint32_t cluster_seen = 0;
  for (const Thread& thread : block.threads) {
    holds += thread.reduce_operand;
    cluster_seen = std::max(cluster_seen, thread.cluster_seen);
  }
  if (block.clocks_active) {  // threads are ordered by the epoch; what they know about bulk copies and products is shared here
    for (size_t i = block.thread_count; i < clock_entries(); ++i) {
      uint32_t latest = 0;
      for (const Thread& thread : block.threads) latest = std::max(latest, thread.clock[i]);
      for (Thread& thread : block.threads) thread.clock[i] = latest;
    }
  }
  for (Thread& thread : block.threads) {
    switch (thread.reduce_kind) {
      case int(Predicate::count): thread.reduce_result = holds; break;
      case int(Predicate::all): thread.reduce_result = holds == int(block.thread_count); break;
      case int(Predicate::any): thread.reduce_result = holds > 0; break;
      default: break;
    }
    ++thread.block_epoch;
    ++thread.warp_epoch;
    thread.parted = false;
    thread.cluster_seen = cluster_seen;
    make_ready(&thread);
  }
}

static NamedBarrier& come_to_named_barrier(int id, int threads) {
  if (id < 1 || id > 15) fail("named barrier %d: ids are 1 to 15", id);
  if (threads <= 0 || threads % int(warp_lanes) != 0 || threads > int(block.thread_count))
    fail("named barrier %d for %d threads: use a multiple of 32, at most the %u threads of the block", id, threads, block.thread_count);
  activate_clocks();
  NamedBarrier& barrier = block.named_barriers[id];
  if ((!barrier.waiting.empty() || !barrier.arrived.empty()) && barrier.expected != threads)
    fail("named barrier %d: this thread expects %d threads, others expect %d", id, threads, barrier.expected);
  const std::vector<unsigned>& arrived = barrier.arrived;
  if (std::find(arrived.begin(), arrived.end(), self()->linear) != arrived.end())
    fail("named barrier %d: this thread comes to it twice before the others came", id);
  barrier.expected = threads;
  return barrier;
}

static bool complete(const NamedBarrier& barrier) { return int(barrier.waiting.size() + barrier.arrived.size()) >= barrier.expected; }

static void release_named_barrier(NamedBarrier& barrier, const Thread* running) {
  if (!barrier.clock.empty())
    for (Thread* waiting : barrier.waiting) join(waiting->clock, barrier.clock);
  join_all(barrier.waiting);
  for (Thread* waiting : barrier.waiting)
    if (waiting != running) make_ready(waiting);
  barrier.waiting.clear();
  barrier.arrived.clear();
  barrier.clock.clear();
}

void named_barrier_arrive(int id, int threads) {
  RuntimeScope scope;
  NamedBarrier& barrier = come_to_named_barrier(id, threads);
  barrier.arrived.push_back(self()->linear);
  release_to(barrier.clock, self());
  if (complete(barrier)) release_named_barrier(barrier, self());
}

void named_barrier_sync(int id, int threads) {
  RuntimeScope scope;
  Thread* thread = self();
  NamedBarrier& barrier = come_to_named_barrier(id, threads);
  barrier.waiting.push_back(thread);
  if (!complete(barrier)) {
    thread->state = State::at_named_barrier;
    thread->named_barrier = id;
    warp_of(thread).runnable &= ~(1u << thread->lane);
    suspend();
    return;
  }
  release_named_barrier(barrier, thread);
}

// --- warp collectives ----------------------------------------------------------------------------------------------
static void complete(Warp& warp, Collective kind, unsigned mask, WarpFunction function, Reduction reduction) {
  auto each_lane = [mask](auto&& visit) {
    for (unsigned rest = mask; rest; rest &= rest - 1) visit(unsigned(__builtin_ctz(rest)));
  };
  switch (kind) {
    case Collective::shuffle:
      each_lane([&](unsigned lane) {
        const unsigned source = unsigned(warp.operand[lane]) & 31;
        if (!(mask >> source & 1)) fail("shuffle: lane %u reads lane %u, which is not in mask 0x%08x", lane, source, mask);
        warp.out[lane] = warp.in[source];
      });
      break;
    case Collective::ballot: {
      uint64_t votes = 0;
      each_lane([&](unsigned lane) { votes |= uint64_t(warp.in[lane] != 0) << lane; });
      each_lane([&](unsigned lane) { warp.out[lane] = votes; });
      break;
    }
    case Collective::match:
      each_lane([&](unsigned lane) {
        uint64_t equal = 0;
        each_lane([&](unsigned other) { equal |= uint64_t(warp.in[other] == warp.in[lane]) << other; });
        warp.out[lane] = equal;
      });
      break;
    case Collective::reduce: {
      unsigned result = unsigned(warp.in[__builtin_ctz(mask)]);
      each_lane([&](unsigned lane) {
        if (lane == unsigned(__builtin_ctz(mask))) return;
        const unsigned value = unsigned(warp.in[lane]);
        switch (reduction) {
          case Reduction::add: result += value; break;
          case Reduction::min_signed: result = unsigned(std::min(int(result), int(value))); break;
          case Reduction::max_signed: result = unsigned(std::max(int(result), int(value))); break;
          case Reduction::min_unsigned: result = std::min(result, value); break;
          case Reduction::max_unsigned: result = std::max(result, value); break;
          case Reduction::bit_and: result &= value; break;
          case Reduction::bit_or: result |= value; break;
          case Reduction::bit_xor: result ^= value; break;
        }
      });
      each_lane([&](unsigned lane) { warp.out[lane] = result; });
      break;
    }
    case Collective::tensor_core:
    case Collective::ldmatrix:
    case Collective::warpgroup:
      function(const_cast<void* const*>(warp.in_pointer), warp.out_pointer);
      break;
    case Collective::barrier: {
      Thread* lanes = &block.threads[(self()->linear / warp_lanes) * warp_lanes];
      if (block.clocks_active) {
        std::vector<Thread*> participants;
        each_lane([&](unsigned lane) { participants.push_back(&lanes[lane]); });
        join_all(participants);
      }
      each_lane([&](unsigned lane) {
        ++lanes[lane].warp_epoch;
        lanes[lane].parted = false;
      });
      break;
    }
  }
}

// The last lane of `mask` to arrive completes the operation for all of them and runs on.
static void arrive(Collective kind, unsigned mask, WarpFunction function = nullptr, Reduction reduction = Reduction::add) {
  Thread* thread = self();
  Warp& warp = warp_of(thread);
  const unsigned bit = 1u << thread->lane;
  if (!(mask & bit))
    fail("warp %s with mask 0x%08x, which does not contain the calling lane %u", name_of(kind), mask, thread->lane);
  if (mask & ~warp.alive)
    fail("warp %s with mask 0x%08x names lanes 0x%08x that have exited or do not exist", name_of(kind), mask, mask & ~warp.alive);
  // Lanes that are still at another collective may come later; if they never do, the scheduler reports the deadlock.
  size_t found = 0;
  while (found < warp.groups.size() && (warp.groups[found].mask != mask || warp.groups[found].kind != kind)) ++found;
  if (found == warp.groups.size()) warp.groups.push_back({mask, 0, kind});
  Warp::Group& group = warp.groups[found];
  group.arrived |= bit;
  if (group.arrived != mask) {
    thread->state = State::in_warp_collective;
    thread->collective = kind;
    thread->collective_mask = mask;
    warp.runnable &= ~bit;
    suspend();
    return;
  }
  warp.groups.erase(warp.groups.begin() + long(found));
  complete(warp, kind, mask, function, reduction);
  Thread* lanes = thread - thread->lane;
  for (unsigned rest = mask & ~bit; rest; rest &= rest - 1) lanes[__builtin_ctz(rest)].state = State::ready;
  warp.runnable |= mask;
}

uint64_t warp_shuffle(unsigned mask, uint64_t bits, int source_lane) {
  RuntimeScope scope;
  Thread* thread = self();
  Warp& warp = warp_of(thread);
  warp.in[thread->lane] = bits;
  warp.operand[thread->lane] = source_lane;
  arrive(Collective::shuffle, mask);
  return warp.out[thread->lane];
}
static uint64_t exchange(Collective kind, unsigned mask, uint64_t value, Reduction reduction = Reduction::add) {
  Thread* thread = self();
  Warp& warp = warp_of(thread);
  warp.in[thread->lane] = value;
  arrive(kind, mask, nullptr, reduction);
  return warp.out[thread->lane];
}
unsigned warp_ballot(unsigned mask, int predicate) {
  RuntimeScope scope;
  return unsigned(exchange(Collective::ballot, mask, predicate != 0));
}
unsigned warp_match_any(unsigned mask, uint64_t bits) {
  RuntimeScope scope;
  return unsigned(exchange(Collective::match, mask, bits));
}
unsigned warp_reduce(unsigned mask, unsigned value, Reduction kind) {
  RuntimeScope scope;
  return unsigned(exchange(Collective::reduce, mask, value, kind));
}
void warp_barrier(unsigned mask) {
  RuntimeScope scope;
  arrive(Collective::barrier, mask);
}
unsigned active_mask() { return warp_of(self()).alive; }

void whole_warp(Collective kind, const void* in, void* out, WarpFunction function) {
  RuntimeScope scope;
  Thread* thread = self();
  Warp& warp = warp_of(thread);
  warp.in_pointer[thread->lane] = in;
  warp.out_pointer[thread->lane] = out;
  arrive(kind, 0xffffffffu, function);
}

}  // namespace emu
