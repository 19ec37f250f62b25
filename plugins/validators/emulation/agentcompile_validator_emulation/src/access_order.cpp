// When two accesses are ordered: within a block by block and warp barriers, vector clocks and cluster barriers; between blocks by
// a fence, an atomic operation on one address, and a fence again.
#include "access_order.h"

#include <dlfcn.h>

#include <algorithm>

namespace emu {

BlockChecks checks;
std::vector<BlockChecks> parked_checks;
static std::unordered_map<uintptr_t, std::vector<Publication>> published_at;

// --- messages ------------------------------------------------------------------------------------------------------
std::string place(const void* code) {
  Dl_info info;
  char text[40] = "";
  if (code && dladdr(const_cast<void*>(code), &info))
    snprintf(text, sizeof text, " [code +0x%zx]", size_t(static_cast<const char*>(code) - static_cast<const char*>(info.dli_fbase)) - 1);
  return text;
}
const char* verb(Access access) { return access == Access::write ? "write" : "read"; }
std::string describe(const Stamp& stamp) {
  char text[80];
  if (stamp.thread == cluster_remote)
    snprintf(text, sizeof text, "thread %u of block %u of the cluster", stamp.warp_epoch, stamp.block_epoch);
  else if (stamp.thread > max_threads + max_mbarriers)
    snprintf(text, sizeof text, "a product of warp %u", stamp.thread - max_threads - max_mbarriers - 1);
  else if (stamp.thread > max_threads)
    snprintf(text, sizeof text, "a %s on mbarrier %u", is_message(stamp) ? "message" : "bulk copy", stamp.thread - max_threads - 1);
  else if (stamp.block != block.linear + 1)
    snprintf(text, sizeof text, "thread %u of block %u", stamp.thread - 1u, stamp.block - 1);
  else
    snprintf(text, sizeof text, "thread %u", stamp.thread - 1u);
  return text;
}

// --- order ---------------------------------------------------------------------------------------------------------
Stamp stamp_of(const Thread* thread) {
  return {block.linear + 1, thread->time, thread->block_epoch, thread->warp_epoch, uint16_t(thread->linear + 1),
          uint16_t(thread->cluster_arrivals)};
}
bool ordered_in_block(const Thread* thread, const Stamp& earlier) {
  if (earlier.thread == cluster_remote) return thread->cluster_seen >= earlier.time;
  if (earlier.thread > max_threads) {
    const size_t entry = block.thread_count + (earlier.thread - max_threads - 1);
    return entry < thread->clock.size() && thread->clock[entry] >= earlier.time;
  }
  const unsigned other = earlier.thread - 1u;
  if (other == thread->linear || earlier.block_epoch != thread->block_epoch) return true;
  if (thread->cluster_seen > earlier.cluster_arrivals) return true;  // a cluster barrier lies between
  if (other / warp_lanes == thread->warp && earlier.warp_epoch != thread->warp_epoch) return true;
  return block.clocks_active && thread->clock[other] >= earlier.time;
}
static bool covers(const Publication& publication, const Stamp& earlier) {
  const Stamp& point = publication.point;
  if (point.block != earlier.block) return false;
  if (publication.covers_block && earlier.block_epoch < point.block_epoch) return true;
  if (!publication.covers_thread) return false;
  if (earlier.thread == point.thread) return earlier.time <= point.time;
  return (earlier.thread - 1u) / warp_lanes == (point.thread - 1u) / warp_lanes && earlier.block_epoch == point.block_epoch &&
         earlier.warp_epoch < point.warp_epoch;
}
// A thread may rely on an acquisition if it knows of the atomic operation's result and a fence followed the operation: one of
// the acquiring thread, or one of its own.
static bool usable(const Acquisition& acquisition, const Thread* thread) {
  const bool same_warp = acquisition.thread / warp_lanes == thread->warp;
  if (acquisition.fence_epoch && (same_warp || thread->block_epoch > acquisition.fence_epoch)) return true;
  return thread->fence_epoch > acquisition.block_epoch;
}
bool ordered(const Thread* thread, const Stamp& earlier) {
  if (earlier.block == block.linear + 1) return ordered_in_block(thread, earlier);
  const bool same_cluster = (earlier.block - 1) / cluster_size() == block.linear / cluster_size();
  if (same_cluster && thread->cluster_seen > earlier.cluster_arrivals) return true;
  for (const Acquisition& acquisition : checks.acquired)
    if (usable(acquisition, thread))
      for (const Publication& publication : acquisition.publications)
        if (covers(publication, earlier)) return true;
  return false;
}

static void remember_read(Cell& cell, const Stamp& now) {
  const auto replaceable = [&](const Stamp& old) {
    if (!old.thread) return true;
    return old.block == now.block && (old.thread == now.thread || old.block_epoch != now.block_epoch);
  };
  if (replaceable(cell.read)) {
    cell.read = now;
    return;
  }
  const auto same_warp = [](const Stamp& a, const Stamp& b) {
    return a.block == b.block && (a.thread - 1u) / warp_lanes == (b.thread - 1u) / warp_lanes;
  };
  if (replaceable(cell.other_read) || !same_warp(cell.read, now) || same_warp(cell.read, cell.other_read)) cell.other_read = now;
}

void check_order(const Thread* thread, Cell& cell, AccessKind kind, const char* where, size_t offset, const void* code, const Stamp& now) {
  if (cell.write.thread && !ordered(thread, cell.write)) {
    if (cell.write.thread == cluster_remote)
      fail("race: %s at byte %zu: %s by this thread and store by %s, with no cluster barrier between them%s", where, offset,
           verb(kind.access), describe(cell.write).c_str(), place(code).c_str());
    const bool copy = cell.write.thread > max_threads;
    const char* what = is_message(cell.write) ? "message in flight:" : copy ? "bulk copy in flight:" : "race:";
    fail("%s %s at byte %zu: %s by this thread and write by %s, %s%s", what, where, offset, verb(kind.access), describe(cell.write).c_str(),
         copy ? "without waiting for that mbarrier's phase"
         : cell.write.block == now.block ? "with no barrier between them"
                                         : "with no fence and atomic operation that order the two blocks",
         place(code).c_str());
  }
  if (kind.access == Access::read) return remember_read(cell, now);
  for (const Stamp* reader : {&cell.read, &cell.other_read})
    if (reader->thread && !ordered(thread, *reader))
      fail("race: %s at byte %zu: write by this thread and read by %s, %s%s", where, offset, describe(*reader).c_str(),
           reader->block == now.block ? "with no barrier between them"
                                      : "with no fence and atomic operation that order the two blocks",
           place(code).c_str());
  cell.write = now;
  cell.read = cell.other_read = Stamp{};
}

// --- fences and atomic operations ----------------------------------------------------------------------------------
void device_fence() {
  Thread* thread = self();
  thread->fence_epoch = thread->block_epoch;
  for (Acquisition& acquisition : checks.acquired)
    if (acquisition.thread == thread->linear && !acquisition.fence_epoch) acquisition.fence_epoch = thread->block_epoch;
  if (thread->unfenced_writes) {
    thread->unfenced_writes = false;
    --block.unfenced_writers;
  }
}

static void acquire_at(uintptr_t address, const Thread* thread) {
  auto found = published_at.find(address);
  if (found != published_at.end()) checks.acquired.push_back({found->second, thread->linear, thread->block_epoch});
}

void note_atomic(const void* address, size_t bytes) {
  if (!options.checks) return;
  RuntimeScope scope;
  check_access(address, bytes, {Access::write, true}, __builtin_return_address(0));
  if (static_region.contains(address) || dynamic_region.contains(address)) return;
  Thread* thread = self();
  const uintptr_t key = reinterpret_cast<uintptr_t>(address);
  acquire_at(key, thread);
  std::vector<Publication>& published = published_at[key];
  const bool covers_block = thread->fence_epoch == thread->block_epoch || block.unfenced_writers == 0;
  published.push_back({stamp_of(thread), covers_block, !thread->unfenced_writes});
  for (const Acquisition& acquisition : checks.acquired)
    if (usable(acquisition, thread))
      for (const Publication& publication : acquisition.publications)
        if (std::none_of(published.begin(), published.end(), [&](const Publication& known) {
              return known.point.block == publication.point.block && known.point.thread == publication.point.thread &&
                     known.point.time >= publication.point.time;
            }))
          published.push_back(publication);
  ++thread->time;
}

void note_relaxed_load(const void* address, size_t bytes) {
  if (!options.checks) return;
  RuntimeScope scope;
  acquire_at(reinterpret_cast<uintptr_t>(address), self());  // ordered after atomic operations on it, not after plain writes
  check_access(address, bytes, {Access::read, false, true}, __builtin_return_address(0));
}

void forget_publications() { published_at.clear(); }

}  // namespace emu
