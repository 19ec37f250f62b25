// Thread-block clusters: the blocks of a cluster take turns on the one set of global runtime state. A block runs until all its
// threads wait or have ended; then its state, its dynamic shared memory and the contents of its static shared memory are put
// aside for the next one. Static shared arrays have one address in all blocks, as they have on a GPU.
#include "runtime.h"

namespace emu {

struct ParkedBlock {
  Block block;
  SharedRegion dynamic;
  std::vector<char> static_contents;
};
static std::vector<ParkedBlock> parked;  // by rank; the active block's place holds nothing of use
static unsigned active_rank;
static uint32_t completed_phases;

unsigned cluster_size() { return unsigned(parked.size()); }

// Between static arrays lie the sanitizer's red zones, so this copies byte by byte around them.
static EMU_RAW void copy_static(char* to, const char* from) {
  for (size_t i = 0; i < static_region.bytes; ++i) {
#if EMU_ADDRESS_SANITIZER
    if (__asan_address_is_poisoned(static_region.low + i)) continue;
#endif
    static_cast<volatile char*>(to)[i] = static_cast<const volatile char*>(from)[i];
  }
}

static void exchange(unsigned rank) {
  std::swap(block, parked[rank].block);
  std::swap(dynamic_region, parked[rank].dynamic);
  swap_block_checks(rank);
}

void activate_block(unsigned rank) {
  if (rank == active_rank) return;
  parked[active_rank].static_contents.resize(static_region.bytes);
  copy_static(parked[active_rank].static_contents.data(), static_region.low);
  exchange(active_rank);
  active_rank = rank;
  exchange(rank);
  const std::vector<char>& contents = parked[rank].static_contents;
  if (contents.size() == static_region.bytes) copy_static(static_region.low, contents.data());
}

void begin_cluster_launch(unsigned size) {
  if (active_rank != 0) activate_block(0);
  for (size_t rank = size; rank < parked.size(); ++rank) free(parked[rank].dynamic.low);
  parked.resize(size);
}
void begin_cluster() { completed_phases = 0; }

bool allocate_dynamic_shared(size_t bytes) {
  dynamic_region.name = "dynamic shared memory";
  if (bytes == dynamic_region.bytes) return true;
  free(dynamic_region.low);
  dynamic_region.low = nullptr;
  dynamic_region.bytes = 0;
  void* memory = nullptr;
  if (bytes && posix_memalign(&memory, 1024, bytes)) return false;  // the exact size: a sanitizer sees one byte too many
  dynamic_region.low = static_cast<char*>(memory);
  dynamic_region.bytes = bytes;
  return true;
}

Block& block_of(unsigned rank) { return rank == active_rank ? block : parked[rank].block; }

// --- cluster barriers ----------------------------------------------------------------------------------------------
unsigned cluster_rank() { return active_rank; }

void cluster_arrive(bool release) {
  RuntimeScope scope;
  Thread* thread = self();
  if (thread->cluster_arrivals > thread->cluster_waits)
    fail("the thread arrives at the cluster barrier twice without ac::cluster_wait()");
  if (!release && !thread->unpublished_stores.empty())
    fail("ac::cluster_arrive_relaxed() does not publish the thread's stores to other blocks; use ac::cluster_arrive_release()");
  if (thread->parted)
    fail("a cluster barrier is executed by whole warps: join the lanes by __syncwarp() after one of them initialises an mbarrier");
  ++thread->cluster_arrivals;
}

void cluster_wait() {
  RuntimeScope scope;
  Thread* thread = self();
  if (thread->cluster_arrivals == thread->cluster_waits) fail("ac::cluster_wait() without an arrival before it");
  if (completed_phases <= thread->cluster_waits) {
    thread->state = State::at_cluster_barrier;
    warp_of(thread).runnable &= ~(1u << thread->lane);
    suspend();
  }
  thread->cluster_seen = ++thread->cluster_waits;
}

void wake_cluster_waiters() {
  for (Thread& thread : block.threads)
    if (thread.state == State::at_cluster_barrier && completed_phases > thread.cluster_waits) make_ready(&thread);
}

char* shared_memory_of(unsigned rank, bool is_static) {
  if (is_static) return rank == active_rank ? static_region.low : parked[rank].static_contents.data();
  return rank == active_rank ? dynamic_region.low : parked[rank].dynamic.low;
}

void perform(const RemoteStore& store) {
  std::memcpy(shared_memory_of(store.rank, store.is_static) + store.offset, store.values, store.bytes);
}

bool complete_cluster_phase() {
  bool awaited = false;
  for (unsigned rank = 0; rank < cluster_size(); ++rank) {
    for (const Thread& thread : block_of(rank).threads) {
      if (thread.state == State::done) continue;
      if (thread.cluster_arrivals <= completed_phases) return false;
      awaited |= thread.state == State::at_cluster_barrier;
    }
  }
  if (!awaited) return false;
  ++completed_phases;
  for (unsigned rank = 0; rank < cluster_size(); ++rank) {
    for (Thread& thread : block_of(rank).threads) {
      for (const RemoteStore& store : thread.unpublished_stores)
        if (options.lazy_copies) perform(store);
      thread.unpublished_stores.clear();
    }
  }
  return true;
}

std::string describe_cluster_barrier() {
  unsigned missing = 0;
  for (unsigned rank = 0; rank < cluster_size(); ++rank)
    for (const Thread& thread : block_of(rank).threads)
      missing += thread.state != State::done && thread.cluster_arrivals <= completed_phases;
  char text[120];
  snprintf(text, sizeof text, "cluster barrier %u, at which %u live threads of the cluster do not arrive", completed_phases, missing);
  return text;
}

// --- distributed shared memory -------------------------------------------------------------------------------------
RemoteStore remote_store(const char* what, float* shared, unsigned bytes, unsigned rank) {
  const bool is_static = static_region.contains(shared);
  const SharedRegion& region = is_static ? static_region : dynamic_region;
  if (!region.contains(reinterpret_cast<char*>(shared)) || !region.contains(reinterpret_cast<char*>(shared) + bytes - 1))
    fail("%s: the address is not in shared memory", what);
  if (rank >= cluster_size()) fail("%s: block %u of a cluster of %u", what, rank, cluster_size());
  if (rank != active_rank) {
    if (self()->cluster_seen == 0) fail("%s before a cluster barrier says that block %u has started", what, rank);
    bool alive = false;
    for (const Thread& other : block_of(rank).threads) alive |= other.state != State::done;
    if (!alive) fail("%s: block %u of the cluster has exited", what, rank);
  }
  return {rank, is_static, size_t(reinterpret_cast<char*>(shared) - region.low), bytes, {}};
}

void store_to_cluster(float* shared, unsigned rank, float value) {
  RuntimeScope scope;
  Thread* thread = self();
  RemoteStore store = remote_store("store_to_cluster", shared, sizeof value, rank);
  store.values[0] = value;
  check_remote_store(rank == active_rank, block_of(rank).linear, store, nullptr, thread, __builtin_return_address(0));
  RemoteStore now = store;
  if (options.lazy_copies && rank != active_rank) std::memset(now.values, poison, sizeof now.values);
  perform(now);
  if (rank != active_rank) thread->unpublished_stores.push_back(store);
}

}  // namespace emu
