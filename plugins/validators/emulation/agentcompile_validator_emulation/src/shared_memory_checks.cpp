// Checks on shared memory: bounds, bytes that were never written or whose copy is in flight, races, stores from other blocks of
// the cluster.
#include <algorithm>

#include "access_order.h"

namespace emu {

static void begin_history(Cell& cell, unsigned owner_linear) {
  if (cell.owner_block != owner_linear + 1) {
    cell = Cell{};
    cell.owner_block = owner_linear + 1;
  }
}

static const char* guards[2] = {nullptr, nullptr};
void register_shared_guards(const char* before, const char* behind) {
  guards[0] = before;
  guards[1] = behind;
}
static bool touches_guard(const char* address, size_t bytes) {
  for (const char* guard : guards)
    if (guard && address < guard + shared_guard_bytes && address + bytes > guard) return true;
  return false;
}

void check_shared(Thread* thread, const char* address, size_t bytes, AccessKind kind, const void* code) {
  const bool is_static = static_region.contains(address);
  const SharedRegion& region = is_static ? static_region : dynamic_region;
  std::vector<Cell>& cells = is_static ? checks.static_cells : checks.dynamic_cells;
  const size_t offset = size_t(address - region.low);
  if (offset + bytes > region.bytes)
    fail("out of bounds: %s of %zu bytes at byte %zu of %s, which has %zu bytes%s", verb(kind.access), bytes, offset, region.name,
         region.bytes, place(code).c_str());
  if (is_static && touches_guard(address, bytes))
    fail("out of bounds: %s of %zu bytes outside the kernel's static shared variables%s", verb(kind.access), bytes, place(code).c_str());
  each_cell(cells.data() + offset, bytes, [&](Cell& cell, size_t place_in_access) {
    const size_t i = offset + place_in_access;
    begin_history(cell, block.linear);
    if (cell.content == Content::mbarrier)
      fail("%s of an mbarrier object as data, %s byte %zu%s", verb(kind.access), region.name, i, place(code).c_str());
    if (kind.access == Access::read && cell.content == Content::uninitialised)
      fail("uninitialised read: %s at byte %zu, which this block has not written yet (a barrier may be missing)%s", region.name, i,
           place(code).c_str());
    if (cell.content == Content::in_flight)
      fail("cp.async in flight: %s of %s at byte %zu before the copy's group is waited for%s", verb(kind.access), region.name, i,
           place(code).c_str());
    if (kind.access == Access::write) cell.content = Content::valid;
    if (!kind.atomic) check_order(thread, cell, kind, region.name, i, code, stamp_of(thread));
  });
}

template <class Visit>
static void each_shared_cell(const char* address, size_t bytes, Visit visit) {
  if (!options.checks) return;
  const bool is_static = static_region.contains(address);
  const SharedRegion& region = is_static ? static_region : dynamic_region;
  std::vector<Cell>& cells = is_static ? checks.static_cells : checks.dynamic_cells;
  each_cell(cells.data() + (address - region.low), bytes, [&](Cell& cell, size_t place_in_access) {
    begin_history(cell, block.linear);
    visit(cell, place_in_access);
  });
}
void mark_in_flight(char* destination, size_t bytes) {
  each_shared_cell(destination, bytes, [](Cell& cell, size_t) { cell.content = Content::in_flight; });
}
void mark_landed(char* destination, size_t bytes, const Thread* writer) {
  each_shared_cell(destination, bytes, [writer](Cell& cell, size_t) {
    cell.content = Content::valid;
    cell.write = stamp_of(writer);
  });
}
void mark_bulk_landing(char* destination, size_t bytes, const Mbarrier& barrier) {
  Stamp copy;
  copy.block = block.linear + 1;
  copy.thread = uint16_t(max_threads + barrier.index + 1);
  copy.time = barrier.phase + 1;
  each_shared_cell(destination, bytes, [&copy](Cell& cell, size_t) {
    cell.content = Content::valid;
    cell.write = copy;
    cell.read = cell.other_read = Stamp{};
  });
}
void mark_mbarrier(unsigned long long* barrier) {
  each_shared_cell(reinterpret_cast<char*>(barrier), 8, [](Cell& cell, size_t) { cell.content = Content::mbarrier; });
}

// A store is published by the writer's next arrival at the cluster barrier, a message by its mbarrier's phase.
static Stamp stamp_of(unsigned owner_linear, const Mbarrier* barrier, const Thread* writer) {
  Stamp now;
  now.block = owner_linear + 1;
  if (barrier) {
    now.time = barrier->phase + 1;
    now.thread = uint16_t(max_threads + barrier->index + 1);
    now.cluster_arrivals = of_message;
  } else {
    now.time = writer->cluster_arrivals + 1;
    now.block_epoch = block.linear;
    now.warp_epoch = writer->linear;
    now.thread = cluster_remote;
  }
  return now;
}

void check_remote_store(bool active, unsigned owner_linear, const RemoteStore& store, const Mbarrier* barrier, const Thread* writer,
                        const void* code) {
  if (!options.checks) return;
  BlockChecks& owner = active ? checks : parked_checks[store.rank];
  std::vector<Cell>& cells = store.is_static ? owner.static_cells : owner.dynamic_cells;
  const char* where = store.is_static ? static_region.name : dynamic_region.name;
  const char* what = barrier ? "message" : "store";
  if (store.offset + store.bytes > cells.size())
    fail("out of bounds: %s to block %u of the cluster at byte %zu of %s, which has %zu bytes%s", what, store.rank, store.offset, where,
         cells.size(), place(code).c_str());
  const Stamp now = stamp_of(owner_linear, barrier, writer);
  each_cell(cells.data() + store.offset, store.bytes, [&](Cell& cell, size_t place_in_access) {
    const size_t i = store.offset + place_in_access;
    begin_history(cell, owner_linear);
    const Stamp& old = cell.write;
    const bool same_writer =
        !barrier && old.thread == cluster_remote && old.block_epoch == now.block_epoch && old.warp_epoch == now.warp_epoch;
    if (cell.content == Content::mbarrier)
      fail("%s onto an mbarrier object of block %u of the cluster, %s byte %zu%s", what, store.rank, where, i, place(code).c_str());
    for (const Stamp* earlier : {&cell.write, &cell.read, &cell.other_read}) {
      if (!earlier->thread || same_writer) continue;
      if (is_message(*earlier) && cell.read.thread) continue;  // who read it has waited for it
      const uint32_t needed = earlier->thread == cluster_remote ? earlier->time : earlier->cluster_arrivals + 1u;
      const bool own = active && earlier->thread != cluster_remote && ordered_in_block(writer, *earlier);
      if (!own && writer->cluster_seen < needed)
        fail("race: %s of block %u of the cluster at byte %zu: %s by this thread and access by %s, with no cluster barrier between "
             "them%s",
             where, store.rank, i, what, describe(*earlier).c_str(), place(code).c_str());
    }
    cell.content = Content::valid;
    cell.write = now;
    cell.read = cell.other_read = Stamp{};
  });
}

// Whether a thread's store is there for products of `reader`: a fence of the asynchronous proxy lies behind it, and the reader knows of that.
static bool is_fenced(const Stamp& store, const Thread* reader) {
  const Thread& writer = block.threads[store.thread - 1u];
  const auto first = std::lower_bound(writer.proxy_fences.begin(), writer.proxy_fences.end(), store.time,
                                      [](const Thread::ProxyFence& fence, uint32_t time) { return fence.time < time; });
  if (first == writer.proxy_fences.end()) return false;
  return first->block_epoch < reader->block_epoch || (block.clocks_active && reader->clock[writer.linear] > first->time);
}

void check_product_read(const char* address, size_t bytes, const Thread* thread, uint32_t group, const void* code) {
  Stamp now = stamp_of(thread);
  now.thread = product_of(thread->warp);
  now.time = group;
  const char* where = dynamic_region.name;
  each_shared_cell(address, bytes, [&](Cell& cell, size_t place_in_access) {
    const size_t offset = size_t(address - dynamic_region.low) + place_in_access;
    if (cell.content == Content::mbarrier) fail("wgmma reads an mbarrier object, %s byte %zu%s", where, offset, place(code).c_str());
    if (cell.content == Content::uninitialised)
      fail("uninitialised read: %s at byte %zu by wgmma, which this block has not written yet%s", where, offset, place(code).c_str());
    check_order(thread, cell, {Access::read}, where, offset, code, now);
    if (cell.write.thread <= max_threads && !is_fenced(cell.write, thread))
      fail("wgmma reads %s at byte %zu, which %s stored: what threads store is not fenced for the asynchronous proxy%s", where, offset,
           describe(cell.write).c_str(), place(code).c_str());
  });
}

// Every access of that block must be known to this thread: by an arrival of the other's at an mbarrier of this block, or by a cluster
// barrier.
void check_tile_for(unsigned rank, unsigned owner_linear, size_t offset, size_t bytes, const Mbarrier& barrier, const void* code) {
  if (!options.checks) return;
  const Thread* thread = self();
  std::vector<Cell>& cells = parked_checks[rank].dynamic_cells;
  const auto known = thread->clocks_of_others.find(rank);
  const auto is_known = [&](const Stamp& earlier) {
    if (earlier.thread == cluster_remote) return thread->cluster_seen >= earlier.time;
    if (thread->cluster_seen > earlier.cluster_arrivals) return true;
    const size_t entry = earlier.thread > max_threads ? block.thread_count + (earlier.thread - max_threads - 1) : earlier.thread - 1u;
    return known != thread->clocks_of_others.end() && entry < known->second.size() && known->second[entry] >= earlier.time;
  };
  Stamp now;
  now.block = owner_linear + 1;
  now.thread = uint16_t(max_threads + barrier.index + 1);
  now.time = barrier.phase + 1;
  each_cell(cells.data() + offset, bytes, [&](Cell& cell, size_t place_in_access) {
    const size_t i = offset + place_in_access;
    begin_history(cell, owner_linear);
    if (cell.content == Content::mbarrier)
      fail("a tile onto an mbarrier object of block %u of the cluster, %s byte %zu%s", rank, dynamic_region.name, i, place(code).c_str());
    for (const Stamp* earlier : {&cell.write, &cell.read, &cell.other_read})
      if (earlier->thread && !is_known(*earlier))
        fail("race: %s of block %u of the cluster at byte %zu: a tile fetched by this thread and access by %s, which has not arrived at an "
             "mbarrier of this block since%s", dynamic_region.name, rank, i, describe(*earlier).c_str(), place(code).c_str());
    cell.content = Content::valid;
    cell.write = now;
    cell.read = cell.other_read = Stamp{};
  });
}

void check_mbarrier_use(unsigned long long* barrier) {
  each_shared_cell(reinterpret_cast<char*>(barrier), 1, [](Cell& cell, size_t) {
    if (cell.write.thread && !ordered(self(), cell.write))
      fail("race: an mbarrier is used by this thread and initialised by %s, with no barrier between them", describe(cell.write).c_str());
  });
}

}  // namespace emu
