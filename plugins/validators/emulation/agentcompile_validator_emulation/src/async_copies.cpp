// cp.async groups, mbarriers and bulk copies. With `options.lazy_copies` a copy lands only when something that the program
// waits for forces it; until then its destination holds garbage, so a missing wait gives a wrong result instead of a lucky one.
#include <algorithm>

#include "runtime.h"

namespace emu {

static EMU_RAW void move_bytes(const PendingCopy& copy) {
  if (copy.source_bytes) std::memcpy(copy.destination, copy.source, copy.source_bytes);
  std::memset(copy.destination + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
}

static bool in_shared_memory(const void* address, size_t bytes) {
  const char* last = static_cast<const char*>(address) + bytes - 1;
  return (static_region.contains(address) && static_region.contains(last)) ||
         (dynamic_region.contains(address) && dynamic_region.contains(last));
}

// --- cp.async ------------------------------------------------------------------------------------------------------
void cp_async(void* shared, const void* global, int bytes, int source_bytes, bool settled) {
  RuntimeScope scope;
  const void* code = __builtin_return_address(0);
  if (!in_shared_memory(shared, size_t(bytes))) return fail("cp.async: the destination is not inside shared memory");
  if (reinterpret_cast<uintptr_t>(shared) % 16 || reinterpret_cast<uintptr_t>(global) % 16)
    return fail("cp.async: both addresses must be aligned to 16 bytes");
  if (source_bytes) check_access(global, size_t(source_bytes), {Access::read, false, settled, settled}, code);
  check_access(shared, size_t(bytes), {Access::write}, code);
  const PendingCopy copy{static_cast<char*>(shared), static_cast<const char*>(global), unsigned(bytes), unsigned(source_bytes)};
  if (options.lazy_copies)
    std::memset(copy.destination, poison, copy.bytes);
  else
    move_bytes(copy);
  mark_in_flight(copy.destination, copy.bytes);
  self()->open_group.push_back(copy);
}
void cp_async_commit() {
  RuntimeScope scope;
  Thread* thread = self();
  thread->groups.push_back(std::move(thread->open_group));
  thread->open_group.clear();
}
void cp_async_wait(int pending_groups) {
  RuntimeScope scope;
  Thread* thread = self();
  while (int(thread->groups.size()) > pending_groups) {
    for (const PendingCopy& copy : thread->groups.front()) {
      if (options.lazy_copies) move_bytes(copy);
      mark_landed(copy.destination, copy.bytes, thread);
    }
    thread->groups.erase(thread->groups.begin());
  }
}

bool copies_on_their_way(const Thread* thread) {
  const auto reads = [](const PendingCopy& copy) { return copy.source_bytes > 0; };
  const auto any_reads = [&](const auto& group) { return std::any_of(group.begin(), group.end(), reads); };
  return any_reads(thread->open_group) || std::any_of(thread->groups.begin(), thread->groups.end(), any_reads);
}

// --- mbarriers -----------------------------------------------------------------------------------------------------
std::string describe_mbarrier(const Mbarrier& barrier) {
  char text[160];
  snprintf(text, sizeof text, "mbarrier %u in phase %u: %d arrivals and %lld bytes missing", barrier.index, barrier.phase,
           barrier.pending_arrivals, barrier.pending_bytes);
  return text;
}

Mbarrier* find_mbarrier(unsigned long long* address) {
  auto found = block.mbarriers.find(address);
  if (found == block.mbarriers.end()) fail("an mbarrier is used before ac::mbarrier_init");
  if (!block.barriers_published) fail("an mbarrier is used before ac::mbarrier_init_fence");
  check_mbarrier_use(address);
  return found->second.get();
}

void mbarrier_init(unsigned long long* address, int arrivals) {
  RuntimeScope scope;
  if (!in_shared_memory(address, 8) || reinterpret_cast<uintptr_t>(address) % 8)
    return fail("mbarrier_init: the barrier must be 8 aligned bytes of shared memory");
  if (arrivals < 1) return fail("mbarrier_init with %d arrivals: use at least 1", arrivals);
  if (block.mbarriers.size() == max_mbarriers) return fail("more than %u mbarriers in one block", max_mbarriers);
  activate_clocks();
  check_access(address, 8, {Access::write}, __builtin_return_address(0));
  auto barrier = std::make_unique<Mbarrier>();
  barrier->address = address;
  barrier->index = unsigned(block.mbarriers.size());
  barrier->arrivals_per_phase = barrier->pending_arrivals = arrivals;
  if (!block.mbarriers.emplace(address, std::move(barrier)).second) return fail("mbarrier_init on a live mbarrier");
  block.barriers_published = false;
  self()->parted = true;
  *address = 0;
  mark_mbarrier(address);
}
void mbarrier_init_fence() {
  block.barriers_published = true;
  block.published_after = self()->cluster_arrivals;
}

static void acquire_phase(const Mbarrier& barrier, Thread* thread) {
  acquire_from(barrier.completed, thread);
  for (const auto& [rank, clock] : barrier.completed_of_others) join(thread->clocks_of_others[rank], clock);
}

void complete_phase_if_done(Mbarrier& barrier) {
  if (barrier.pending_arrivals > 0 || barrier.pending_bytes != 0) return;
  ++barrier.phase;
  if (block.clocks_active) {  // the copies of this phase become visible to whoever waits for it
    barrier.arriving.resize(clock_entries(), 0);
    barrier.arriving[block.thread_count + barrier.index] = barrier.phase;
  }
  barrier.completed = std::move(barrier.arriving);
  barrier.arriving.clear();
  barrier.completed_of_others = std::move(barrier.arriving_of_others);
  barrier.arriving_of_others.clear();
  barrier.pending_arrivals = barrier.arrivals_per_phase;
  for (Thread& thread : block.threads) {
    if (thread.state != State::at_mbarrier || thread.awaited != &barrier || (barrier.phase & 1) == thread.awaited_parity) continue;
    acquire_phase(barrier, &thread);
    make_ready(&thread);
  }
}

static void arrive(Mbarrier* barrier, unsigned expected_bytes) {
  if (barrier->pending_arrivals == 0)
    fail("mbarrier %u: more than %d arrivals in phase %u", barrier->index, barrier->arrivals_per_phase, barrier->phase);
  release_to(barrier->arriving, self());
  barrier->pending_bytes += expected_bytes;
  --barrier->pending_arrivals;
  complete_phase_if_done(*barrier);
}

void mbarrier_arrive(unsigned long long* address, unsigned expected_bytes) {
  RuntimeScope scope;
  arrive(find_mbarrier(address), expected_bytes);
}

void let_remote_arrivals_count() {
  for (auto& [address, barrier] : block.mbarriers) {
    const std::vector<RemoteArrival> arrivals = std::move(barrier->arrivals);
    barrier->arrivals.clear();
    for (const RemoteArrival& arrival : arrivals) {
      if (barrier->pending_arrivals == 0)
        return fail("mbarrier %u: more than %d arrivals in phase %u, the latest of block %u of the cluster", barrier->index,
                    barrier->arrivals_per_phase, barrier->phase, arrival.rank);
      join(barrier->arriving_of_others[arrival.rank], arrival.clock);
      --barrier->pending_arrivals;
      complete_phase_if_done(*barrier);
    }
  }
}

void mbarrier_wait(unsigned long long* address, unsigned parity, bool of_cluster) {
  RuntimeScope scope;
  Thread* thread = self();
  Mbarrier* barrier = find_mbarrier(address);
  if (parity > 1) fail("mbarrier_wait with parity %u: use 0 or 1", parity);
  if ((barrier->phase & 1) != parity) {
    acquire_phase(*barrier, thread);
  } else {
    thread->state = State::at_mbarrier;
    thread->awaited = barrier;
    thread->awaited_parity = parity;
    warp_of(thread).runnable &= ~(1u << thread->lane);
    suspend();
  }
  if (!of_cluster && barrier->message_phase && barrier->message_phase == barrier->phase)
    fail("ac::mbarrier_wait does not acquire what other blocks sent; use ac::mbarrier_wait_cluster()");
}

// --- bulk copies ---------------------------------------------------------------------------------------------------
static void land(Mbarrier& barrier, const CopyRequest& request) {
  for (const PendingCopy& copy : request) {
    move_bytes(copy);
    barrier.pending_bytes -= copy.bytes;
  }
  complete_phase_if_done(barrier);
}

void ask(Mbarrier& barrier, CopyRequest request) {
  if (!options.lazy_copies) return land(barrier, request);
  for (const PendingCopy& copy : request) std::memset(copy.destination, poison, copy.bytes);
  barrier.in_flight.push_back(std::move(request));
}

void land_all_copies() {
  for (auto& [address, barrier] : block.mbarriers) {
    const std::vector<CopyRequest> requests = std::move(barrier->in_flight);
    barrier->in_flight.clear();
    for (const CopyRequest& request : requests) land(*barrier, request);
  }
}

void bulk_copy(void* shared, const void* global, unsigned bytes, unsigned long long* address) {
  RuntimeScope scope;
  const void* code = __builtin_return_address(0);
  Mbarrier* barrier = find_mbarrier(address);
  if (bytes == 0 || bytes % 16) return fail("bulk copy of %u bytes: the size must be a positive multiple of 16", bytes);
  if (reinterpret_cast<uintptr_t>(shared) % 16 || reinterpret_cast<uintptr_t>(global) % 16)
    return fail("bulk copy: both addresses must be aligned to 16 bytes");
  if (!in_shared_memory(shared, bytes)) return fail("bulk copy of %u bytes: the destination is not inside shared memory", bytes);
  check_access(global, bytes, {Access::read}, code);
  check_access(shared, bytes, {Access::write}, code);
  mark_bulk_landing(static_cast<char*>(shared), bytes, *barrier);
  ask(*barrier, {{static_cast<char*>(shared), static_cast<const char*>(global), bytes, bytes}});
}

bool land_one_copy() {
  std::vector<Mbarrier*> candidates;
  for (auto& [address, barrier] : block.mbarriers)
    if (!barrier->in_flight.empty() || !barrier->messages.empty()) candidates.push_back(barrier.get());
  if (candidates.empty()) return false;
  const bool random = options.order == LaneOrder::random;
  Mbarrier& barrier = *candidates[random ? random_source() % candidates.size() : 0];
  const size_t copies = barrier.in_flight.size();
  const size_t which = random ? random_source() % (copies + barrier.messages.size()) : 0;
  if (which >= copies) {
    land_message(barrier, which - copies);
    return true;
  }
  const CopyRequest request = std::move(barrier.in_flight[which]);
  barrier.in_flight.erase(barrier.in_flight.begin() + long(which));
  land(barrier, request);
  return true;
}

void check_no_copy_in_flight() {
  for (auto& [address, barrier] : block.mbarriers) {
    const char* what = !barrier->in_flight.empty() ? "bulk copy" : !barrier->messages.empty() ? "message of the cluster" : nullptr;
    if (what)
      return fail("the block exits while a %s into its shared memory is in flight (%s)", what, describe_mbarrier(*barrier).c_str());
    if (barrier->pending_bytes < 0)
      return fail("the block exits after mbarrier %u received %lld bytes that it does not expect", barrier->index,
                  -barrier->pending_bytes);
  }
}

}  // namespace emu
