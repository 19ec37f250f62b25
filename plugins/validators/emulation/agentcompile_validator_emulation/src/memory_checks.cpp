// Checks on every load and store of an instrumented kernel: bounds and access rights of each pointer argument, uninitialised
// outputs, races, reads before the dependency wait.
//
// g++'s thread-sanitizer instrumentation calls our own __tsan_* functions (access_hooks.cpp), so one run in any thread order
// finds a race: two accesses to a byte, one of them a write, with nothing between them that orders their threads.
#include <link.h>

#include "access_order.h"

namespace emu {

struct Buffer : BufferSpec {
  std::unique_ptr<Cell[], decltype(&free)> cells{nullptr, &free};
};

static std::vector<Buffer> buffers;
static std::vector<std::pair<const char*, const char*>> module_ranges;

// g++ guards the constructors of static variables, shared arrays of half among them, by variables of its own. Kernels write these
// through no fault of theirs.
static std::vector<const char*> constructor_guards;
static bool guards_a_constructor(const char* address) {
  for (const char* guard : constructor_guards)
    if (address >= guard && address < guard + 8) return true;
  return false;
}
void add_constructor_guard(const char* guard) { constructor_guards.push_back(guard); }

// --- global memory -------------------------------------------------------------------------------------------------
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
    for (const auto& range : module_ranges) {  // constants and globals of the compiled module itself
      if (address < range.first || address + bytes > range.second) continue;
      if (kind.access == Access::write && !guards_a_constructor(address))
        fail("write to a variable of the module: a kernel may keep nothing from one launch to the next%s", place(code).c_str());
      return;
    }
    fail_outside_buffers(address, bytes, kind.access, code);
  }
  const size_t offset = size_t(address - buffer->address);
  if (offset + bytes > buffer->bytes)
    fail("out of bounds: %s of %zu bytes at byte %zu of argument '%s', which has %zu bytes%s", verb(kind.access), bytes, offset,
         buffer->name, buffer->bytes, place(code).c_str());
  if (kind.access == Access::write && buffer->role == role_read)
    fail("write to the read-only argument '%s' at byte %zu%s", buffer->name, offset, place(code).c_str());
  const bool must_wait = options.programmatic_launch && !thread->dependency_waited && !kind.before_dependency;
  if (must_wait && (kind.access == Access::write || buffer->written_by_the_chain))
    fail("%s of argument '%s' before ac::grid_dependency_wait(): an earlier kernel of the chain may still use it%s",
         verb(kind.access), buffer->name, place(code).c_str());
  if (kind.access == Access::write && buffer->published && !kind.atomic && thread->unfenced_writes)
    fail("write to '%s' without __threadfence() after this thread's earlier writes: a kernel that reads it before its dependency wait "
         "may see it before them%s", buffer->name, place(code).c_str());
  if (kind.access == Access::write && !thread->unfenced_writes && !kind.atomic) {
    thread->unfenced_writes = true;
    ++block.unfenced_writers;
  }
  if (buffer->role == role_read) return;
  char where[96];
  where[0] = 0;
  each_cell(&buffer->cells[offset], bytes, [&](Cell& cell, size_t place_in_access) {
    const size_t i = offset + place_in_access;
    if (kind.access == Access::read && buffer->role == role_write && cell.content == Content::uninitialised)
      fail("uninitialised read: argument '%s' at byte %zu is an output and was not written yet%s", buffer->name, i,
           place(code).c_str());
    if (kind.access == Access::write) cell.content = Content::valid;
    if (kind.atomic) return;
    if (!where[0]) snprintf(where, sizeof where, "argument '%s'", buffer->name);
    check_order(thread, cell, kind, where, i, code, stamp_of(thread));
  });
}

// --- entry points --------------------------------------------------------------------------------------------------
void check_access(const void* pointer, size_t bytes, AccessKind kind, const void* code) {
  Thread* thread = self();
  if (!options.checks || !thread || failed) return;
  const char* address = static_cast<const char*>(pointer);
  if (on_stack(thread, pointer)) return;  // registers and local memory
  if (pointer == &current || (pointer >= block.threads.data() && pointer < block.threads.data() + block.thread_count)) return;
  if (kind.must_be_aligned && (reinterpret_cast<uintptr_t>(address) & (bytes - 1)))
    fail("misaligned %zu-byte %s%s", bytes, verb(kind.access), place(code).c_str());
  if (static_region.contains(address) || dynamic_region.contains(address))
    check_shared(thread, address, bytes, kind, code);
  else
    check_global(thread, address, bytes, kind, code);
  if (options.preempt_per_million && long(random_source() % 1000000) < options.preempt_per_million) suspend();
}

void require_aligned(const void* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes == 0) return;
  RuntimeScope scope;
  fail("misaligned %zu-byte access%s", bytes, place(__builtin_return_address(0)).c_str());
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
  forget_publications();
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
