// Checks on every load and store of an instrumented kernel: bounds and access rights of each pointer argument, reads of
// uninitialised or not yet landed shared memory, races within a block and between blocks, reads before the dependency wait.
//
// g++'s thread-sanitizer instrumentation calls our own __tsan_* functions (access_hooks.cpp), so one run in any thread order
// finds a race: two accesses to a byte, one of them a write, with nothing between them that orders their threads.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>

#include "runtime.h"

namespace emu {

// Who accessed a byte, and when. `thread` is the linear index + 1; above max_threads it is mbarrier index + 1 + max_threads,
// that is, a bulk copy, and `time` is the barrier's phase count at which the copy is complete.
// `cluster_remote` is a store of another block of the cluster: `time` is the cluster phase that publishes it, `block_epoch` the
// writer's block and `warp_epoch` its thread.
struct Stamp {
  uint32_t block = 0, time = 0, block_epoch = 0, warp_epoch = 0;
  uint16_t thread = 0, cluster_arrivals = 0;
};
constexpr uint16_t cluster_remote = 0xffff;
enum class Content : uint8_t { uninitialised, valid, in_flight, mbarrier };
struct Cell {
  Stamp write, read, other_read;  // two readers: the first, and the latest of another thread (of another warp if there is one)
  uint32_t owner_block = 0;       // shared memory: cells of an earlier block count as empty
  Content content = Content::uninitialised;
};
struct Buffer : BufferSpec {
  std::unique_ptr<Cell[], decltype(&free)> cells{nullptr, &free};
};
// What another block may rely on after an atomic operation: the accesses of `block` before this point.
struct Publication {
  Stamp point;
  bool covers_block, covers_thread;  // by a fence
};
struct Acquisition {
  std::vector<Publication> publications;
  unsigned thread;
  uint32_t block_epoch;      // of the atomic operation
  uint32_t fence_epoch = 0;  // block epoch of the thread's first __threadfence after it
};

static std::vector<Buffer> buffers;
struct BlockChecks {  // of one block, put aside with it
  std::vector<Cell> static_cells, dynamic_cells;
  std::vector<Acquisition> acquired;
};
static BlockChecks checks;
static std::vector<BlockChecks> parked_checks;  // by rank in the cluster
static std::unordered_map<uintptr_t, std::vector<Publication>> published_at;
static std::vector<std::pair<const char*, const char*>> module_ranges;

// --- messages -------------------------------------------------------------------------------------------------------------------
static std::string place(const void* code) {
  Dl_info info;
  char text[40] = "";
  if (code && dladdr(const_cast<void*>(code), &info))  // Python turns the offset into file and line
    snprintf(text, sizeof text, " [code +0x%lx]", long(static_cast<const char*>(code) - static_cast<const char*>(info.dli_fbase)) - 1);
  return text;
}
static const char* verb(Access access) { return access == Access::write ? "write" : "read"; }
static std::string describe(const Stamp& stamp) {
  char text[80];
  if (stamp.thread == cluster_remote)
    snprintf(text, sizeof text, "thread %u of block %u of the cluster", stamp.warp_epoch, stamp.block_epoch);
  else if (stamp.thread > max_threads)
    snprintf(text, sizeof text, "a bulk copy on mbarrier %u", stamp.thread - max_threads - 1);
  else if (stamp.block != block.linear + 1)
    snprintf(text, sizeof text, "thread %u of block %u", stamp.thread - 1u, stamp.block - 1);
  else
    snprintf(text, sizeof text, "thread %u", stamp.thread - 1u);
  return text;
}

// --- order ----------------------------------------------------------------------------------------------------------------------
static Stamp stamp_of(const Thread* thread) {
  return {block.linear + 1, thread->time, thread->block_epoch, thread->warp_epoch, uint16_t(thread->linear + 1), uint16_t(thread->cluster_arrivals)};
}
static bool ordered_in_block(const Thread* thread, const Stamp& earlier) {
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
static bool ordered(const Thread* thread, const Stamp& earlier) {
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
    return !old.thread || (old.thread == now.thread && old.block == now.block) || (old.block == now.block && old.block_epoch != now.block_epoch);
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

// Compares one byte's history with an access by `thread`; where = "dynamic shared memory", "argument 'x'".
static void check_order(Thread* thread, Cell& cell, AccessKind kind, const char* where, size_t offset, const void* code) {
  const Stamp now = stamp_of(thread);
  if (cell.write.thread && !ordered(thread, cell.write)) {
    if (cell.write.thread == cluster_remote)
      fail("race: %s at byte %zu: %s by this thread and store by %s, with no cluster barrier between them%s", where, offset,
           verb(kind.access), describe(cell.write).c_str(), place(code).c_str());
    const bool copy = cell.write.thread > max_threads;
    fail("%s %s at byte %zu: %s by this thread and write by %s, %s%s", copy ? "bulk copy in flight:" : "race:", where, offset,
         verb(kind.access), describe(cell.write).c_str(),
         copy ? "without waiting for that mbarrier's phase"
         : cell.write.block == now.block ? "with no barrier between them"
                                         : "with no fence and atomic operation that order the two blocks",
         place(code).c_str());
  }
  if (kind.access == Access::read) return remember_read(cell, now);
  for (const Stamp* reader : {&cell.read, &cell.other_read})
    if (reader->thread && !ordered(thread, *reader))
      fail("race: %s at byte %zu: write by this thread and read by %s, %s%s", where, offset, describe(*reader).c_str(),
           reader->block == now.block ? "with no barrier between them" : "with no fence and atomic operation that order the two blocks",
           place(code).c_str());
  cell.write = now;
  cell.read = cell.other_read = Stamp{};
}

// --- shared memory --------------------------------------------------------------------------------------------------------------
static Cell& cell_of(std::vector<Cell>& cells, size_t offset, unsigned owner_linear) {
  Cell& cell = cells[offset];
  if (cell.owner_block != owner_linear + 1) {
    cell = Cell{};
    cell.owner_block = owner_linear + 1;
  }
  return cell;
}
static Cell& cell_of(std::vector<Cell>& cells, size_t offset) { return cell_of(cells, offset, block.linear); }

static void check_shared(Thread* thread, const SharedRegion& region, std::vector<Cell>& cells, const char* address, size_t bytes,
                         AccessKind kind, const void* code) {
  const size_t offset = size_t(address - region.low);
  if (offset + bytes > region.bytes)
    fail("out of bounds: %s of %zu bytes at byte %zu of %s, which has %zu bytes%s", verb(kind.access), bytes, offset, region.name,
         region.bytes, place(code).c_str());
  for (size_t i = offset; i < offset + bytes; ++i) {
    Cell& cell = cell_of(cells, i);
    if (cell.content == Content::mbarrier)
      fail("%s of an mbarrier object as data, %s byte %zu%s", verb(kind.access), region.name, i, place(code).c_str());
    if (kind.access == Access::read && cell.content == Content::uninitialised)
      fail("uninitialised read: %s at byte %zu, which this block has not written yet (a barrier may be missing)%s", region.name, i, place(code).c_str());
    if (cell.content == Content::in_flight)
      fail("cp.async in flight: %s of %s at byte %zu before the copy's group is waited for%s", verb(kind.access), region.name, i,
           place(code).c_str());
    if (kind.access == Access::write) cell.content = Content::valid;
    if (!kind.atomic) check_order(thread, cell, kind, region.name, i, code);
  }
}

template <class Visit>
static void each_shared_cell(const char* address, size_t bytes, Visit visit) {
  if (!options.checks) return;
  const bool is_static = static_region.contains(address);
  const SharedRegion& region = is_static ? static_region : dynamic_region;
  std::vector<Cell>& cells = is_static ? checks.static_cells : checks.dynamic_cells;
  for (size_t i = 0; i < bytes; ++i) visit(cell_of(cells, size_t(address - region.low) + i));
}
void mark_in_flight(char* destination, size_t bytes) {
  each_shared_cell(destination, bytes, [](Cell& cell) { cell.content = Content::in_flight; });
}
void mark_landed(char* destination, size_t bytes, const Thread* writer) {
  each_shared_cell(destination, bytes, [writer](Cell& cell) {
    cell.content = Content::valid;
    cell.write = stamp_of(writer);
  });
}
void mark_bulk_landing(char* destination, size_t bytes, const Mbarrier& barrier) {
  Stamp copy;
  copy.block = block.linear + 1;
  copy.thread = uint16_t(max_threads + barrier.index + 1);
  copy.time = barrier.phase + 1;
  each_shared_cell(destination, bytes, [&copy](Cell& cell) {
    cell.content = Content::valid;
    cell.write = copy;
    cell.read = cell.other_read = Stamp{};
  });
}
void mark_mbarrier(unsigned long long* barrier) {
  each_shared_cell(reinterpret_cast<char*>(barrier), 8, [](Cell& cell) { cell.content = Content::mbarrier; });
}

void check_remote_store(unsigned rank, bool active, unsigned owner_linear, const RemoteStore& store, const Thread* writer, const void* code) {
  if (!options.checks) return;
  BlockChecks& owner = active ? checks : parked_checks[rank];
  std::vector<Cell>& cells = store.is_static ? owner.static_cells : owner.dynamic_cells;
  const char* where = store.is_static ? static_region.name : dynamic_region.name;
  if (store.offset + sizeof store.value > cells.size())
    fail("out of bounds: store to block %u of the cluster at byte %zu of %s, which has %zu bytes%s", rank, store.offset, where,
         cells.size(), place(code).c_str());
  Stamp now;
  now.block = owner_linear + 1;
  now.time = writer->cluster_arrivals + 1;
  now.block_epoch = block.linear;
  now.warp_epoch = writer->linear;
  now.thread = cluster_remote;
  for (size_t i = store.offset; i < store.offset + sizeof store.value; ++i) {
    Cell& cell = cell_of(cells, i, owner_linear);
    const Stamp& old = cell.write;
    const bool same_writer = old.thread == cluster_remote && old.block_epoch == now.block_epoch && old.warp_epoch == now.warp_epoch;
    for (const Stamp* earlier : {&cell.write, &cell.read, &cell.other_read}) {
      if (!earlier->thread || same_writer) continue;
      const uint32_t needed = earlier->thread == cluster_remote ? earlier->time : earlier->cluster_arrivals + 1u;
      const bool own = active && earlier->thread != cluster_remote && ordered_in_block(writer, *earlier);
      if (!own && writer->cluster_seen < needed)
        fail("race: %s of block %u of the cluster at byte %zu: store by this thread and access by %s, with no cluster barrier between them%s",
             where, rank, i, describe(*earlier).c_str(), place(code).c_str());
    }
    cell.content = Content::valid;
    cell.write = now;
    cell.read = cell.other_read = Stamp{};
  }
}

void check_mbarrier_use(unsigned long long* barrier) {
  each_shared_cell(reinterpret_cast<char*>(barrier), 1, [](Cell& cell) {
    if (cell.write.thread && !ordered(self(), cell.write))
      fail("race: an mbarrier is used by this thread and initialised by %s, with no barrier between them", describe(cell.write).c_str());
  });
}

// --- global memory --------------------------------------------------------------------------------------------------------------
[[noreturn]] static void fail_outside_buffers(const char* address, size_t bytes, Access access, const void* code) {
  const Buffer* nearest = nullptr;
  long distance = 0;
  for (const Buffer& buffer : buffers) {
    const long candidate = address < buffer.address ? address - buffer.address : address - (buffer.address + buffer.bytes);
    if (!nearest || labs(candidate) < labs(distance)) {
      nearest = &buffer;
      distance = candidate;
    }
  }
  fail("out of bounds: %s of %zu bytes, %ld bytes %s argument '%s'%s", verb(access), bytes, labs(distance),
       distance < 0 ? "before" : "past the end of", nearest ? nearest->name : "?", place(code).c_str());
  abort();
}

static Buffer* find_buffer(const char* address) {
  static size_t latest = 0;
  if (latest < buffers.size() && size_t(address - buffers[latest].address) < buffers[latest].bytes) return &buffers[latest];
  for (size_t i = 0; i < buffers.size(); ++i)
    if (size_t(address - buffers[i].address) < buffers[i].bytes) return &buffers[latest = i];
  return nullptr;
}

static void check_global(Thread* thread, const char* address, size_t bytes, AccessKind kind, const void* code) {
  Buffer* buffer = find_buffer(address);
  if (!buffer) {
    for (const auto& range : module_ranges)  // constants and globals of the compiled module itself
      if (address >= range.first && address + bytes <= range.second) return;
    fail_outside_buffers(address, bytes, kind.access, code);
  }
  const size_t offset = size_t(address - buffer->address);
  if (offset + bytes > buffer->bytes)
    fail("out of bounds: %s of %zu bytes at byte %zu of argument '%s', which has %zu bytes%s", verb(kind.access), bytes, offset,
         buffer->name, buffer->bytes, place(code).c_str());
  if (kind.access == Access::write && buffer->role == role_read)
    fail("write to the read-only argument '%s' at byte %zu%s", buffer->name, offset, place(code).c_str());
  if (options.programmatic_launch && !thread->dependency_waited && !kind.before_dependency && (kind.access == Access::write || buffer->written_by_the_chain))
    fail("%s of argument '%s' before ac::grid_dependency_wait(): an earlier kernel of the chain may still use it%s", verb(kind.access),
         buffer->name, place(code).c_str());
  if (kind.access == Access::write && !thread->unfenced_writes && !kind.atomic) {
    thread->unfenced_writes = true;
    ++block.unfenced_writers;
  }
  if (buffer->role == role_read) return;
  char where[96];
  where[0] = 0;
  for (size_t i = offset; i < offset + bytes; ++i) {
    Cell& cell = buffer->cells[i];
    if (kind.access == Access::read && buffer->role == role_write && cell.content == Content::uninitialised)
      fail("uninitialised read: argument '%s' at byte %zu is an output and was not written yet%s", buffer->name, i, place(code).c_str());
    if (kind.access == Access::write) cell.content = Content::valid;
    if (kind.atomic) continue;
    if (!where[0]) snprintf(where, sizeof where, "argument '%s'", buffer->name);
    check_order(thread, cell, kind, where, i, code);
  }
}

// --- entry points ---------------------------------------------------------------------------------------------------------------
void check_access(const void* pointer, size_t bytes, AccessKind kind, const void* code) {
  Thread* thread = self();
  if (!options.checks || !thread || failed) return;
  const char* address = static_cast<const char*>(pointer);
  if (on_stack(thread, pointer)) return;  // registers and local memory
  if (pointer == &current || (pointer >= block.threads.data() && pointer < block.threads.data() + block.thread_count)) return;
  if (kind.must_be_aligned && (reinterpret_cast<uintptr_t>(address) & (bytes - 1)))
    fail("misaligned %zu-byte %s%s", bytes, verb(kind.access), place(code).c_str());
  if (static_region.contains(address))
    check_shared(thread, static_region, checks.static_cells, address, bytes, kind, code);
  else if (dynamic_region.contains(address))
    check_shared(thread, dynamic_region, checks.dynamic_cells, address, bytes, kind, code);
  else
    check_global(thread, address, bytes, kind, code);
  if (options.preempt_per_million && long(random_source() % 1000000) < options.preempt_per_million) suspend();
}

void require_aligned(const void* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes == 0) return;
  RuntimeScope scope;
  fail("misaligned %zu-byte access%s", bytes, place(__builtin_return_address(0)).c_str());
}

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

void note_settled_load(const void* address, size_t bytes) {
  if (!options.checks) return;
  RuntimeScope scope;
  check_access(address, bytes, {Access::read, false, true, true}, __builtin_return_address(0));
}

static int collect_module_range(dl_phdr_info* info, size_t, void*) {
  const auto segment = [info](int i) {
    const auto& header = info->dlpi_phdr[i];
    const char* low = reinterpret_cast<const char*>(info->dlpi_addr + header.p_vaddr);
    return std::make_pair(low, header.p_type == PT_LOAD ? low + header.p_memsz : low);
  };
  bool ours = false;
  const char* mark = reinterpret_cast<const char*>(&current);
  for (int i = 0; i < info->dlpi_phnum; ++i) ours |= mark >= segment(i).first && mark < segment(i).second;
  if (!ours) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) module_ranges.push_back(segment(i));
  return 1;
}

void begin_launch_checks(const BufferSpec* specs, int count) {
  buffers.clear();
  published_at.clear();
  if (module_ranges.empty()) dl_iterate_phdr(collect_module_range, nullptr);
  for (int i = 0; i < count; ++i) {
    Buffer buffer;
    static_cast<BufferSpec&>(buffer) = specs[i];
    if (options.checks && buffer.role != role_read)  // calloc: pages that are never touched cost nothing
      buffer.cells.reset(static_cast<Cell*>(calloc(buffer.bytes + 1, sizeof(Cell))));
    buffers.push_back(std::move(buffer));
  }
  parked_checks.resize(cluster_size());
  for (unsigned rank = 0; rank < cluster_size(); ++rank) {
    activate_block(rank);
    checks.static_cells.assign(options.checks ? static_region.bytes : 0, Cell{});
    checks.dynamic_cells.assign(options.checks ? dynamic_region.bytes : 0, Cell{});
  }
}

void end_launch_checks() { buffers.clear(); }

void begin_block_checks() { checks.acquired.clear(); }

void swap_block_checks(unsigned rank) {
  if (rank >= parked_checks.size()) parked_checks.resize(rank + 1);
  std::swap(checks, parked_checks[rank]);
}

}  // namespace emu
