// Inner vocabulary of the emulator's runtime, shared by its .cpp files (which build.cpp includes as one unit).
//
// A block's threads are fibers on one operating-system thread; blocks run one after another. Time within a block is counted by
// its block barriers (`block_epoch`), its warp barriers (`warp_epoch`) and, for mbarriers and named barriers, by vector clocks.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "interface.h"

#if defined(__SANITIZE_ADDRESS__)
#define EMU_ADDRESS_SANITIZER 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define EMU_ADDRESS_SANITIZER 0
#endif
#define EMU_RAW __attribute__((no_sanitize("address"), no_sanitize("undefined")))

namespace emu {

constexpr unsigned warp_lanes = 32, max_threads = 1024, max_shared_bytes = 227 * 1024, max_mbarriers = 64, max_cluster = 16;
constexpr unsigned warpgroup_warps = 4;
constexpr unsigned char poison = 0xff;  // a NaN in every float format

enum class State : uint8_t {
  unstarted, ready, in_warp_collective, at_block_barrier, at_named_barrier, at_mbarrier, at_cluster_barrier, done
};
enum class Collective : uint8_t { shuffle, ballot, match, barrier, reduce, tensor_core, ldmatrix, warpgroup };

struct Fiber;
struct Mbarrier;
using WarpFunction = void (*)(void* const* inputs, void* const* outputs);
// One entry per thread, then one per mbarrier (its bulk copies), then one per warp (groups of its products).
using Clock = std::vector<uint32_t>;

struct PendingCopy {
  char* destination;
  const char* source;
  unsigned bytes, source_bytes;
};
using CopyRequest = std::vector<PendingCopy>;  // lands as a whole

struct RemoteStore {  // a store or message into the shared memory of another block of the cluster
  unsigned rank;
  bool is_static;
  size_t offset;
  unsigned bytes;
  float values[2];
};

struct Thread : ThreadCoordinates {
  State state = State::unstarted;
  Fiber* fiber = nullptr;
  // where it waits
  unsigned barrier_site = 0, collective_mask = 0;
  Collective collective = Collective::barrier;
  Mbarrier* awaited = nullptr;
  unsigned awaited_parity = 0;
  int named_barrier = 0, reduce_operand = 0, reduce_kind = -1, reduce_result = 0;
  // order of its accesses
  uint32_t block_epoch = 1, warp_epoch = 1, time = 1;
  uint32_t fence_epoch = 0;       // block epoch of its latest __threadfence
  bool unfenced_writes = false;
  struct ProxyFence {
    uint32_t time, block_epoch;
  };
  std::vector<ProxyFence> proxy_fences;  // in the order of their times
  Clock clock;                    // empty until the block uses an mbarrier or a named barrier
  std::map<unsigned, Clock> clocks_of_others;  // what arrivals of other blocks of the cluster told it, by rank
  bool dependency_waited = false;
  // its cluster barriers: how often it arrived and waited, and the latest phase that a thread of its block waited for
  uint32_t cluster_arrivals = 0, cluster_waits = 0, cluster_seen = 0;
  std::vector<RemoteStore> unpublished_stores;
  bool parted = false;  // from the other lanes of its warp, which do not initialise an mbarrier, and no barrier has joined them since
  // its cp.async groups
  std::vector<PendingCopy> open_group;
  std::vector<std::vector<PendingCopy>> groups;
};

// Products that a warp has asked for and not waited for.
struct Products {
  struct Sums {  // one array of sums, of all lanes; poisoned while a product makes them
    float* of_lane[warp_lanes];
    unsigned columns, pending;
    std::vector<float> values;  // [16][columns]
  };
  struct Product {
    WarpgroupProduct said;
    const unsigned* rows_of_lane[warp_lanes];
    bool made;
  };
  std::vector<Product> open;
  std::vector<std::vector<Product>> groups;
  std::vector<std::unique_ptr<Sums>> sums;
  bool fenced = false;       // since the latest wait
  uint32_t committed = 0;    // groups
  uint64_t said_so_far = 0;  // a digest: the warps of a warpgroup say the same
};

struct Warp {
  struct Group {
    unsigned mask, arrived;
    Collective kind;
  };
  unsigned alive = 0, runnable = 0;
  std::vector<Group> groups;
  uint64_t in[warp_lanes], out[warp_lanes];
  int operand[warp_lanes];
  const void* in_pointer[warp_lanes];
  void* out_pointer[warp_lanes];
  Products products;
  unsigned registers = 0;  // of each thread, as it asked for; 0: it did not
};

struct RemoteArrival {
  unsigned rank;  // of the block that arrives
  Clock clock;
};

struct Mbarrier {
  unsigned long long* address;
  unsigned index;                 // its entry in clocks is thread_count + index
  int arrivals_per_phase, pending_arrivals;
  long long pending_bytes = 0;    // announced and not yet delivered
  uint32_t phase = 0;
  uint32_t message_phase = 0;     // the latest message is for the phase before this one; 0: none came
  std::vector<CopyRequest> in_flight;
  std::vector<RemoteStore> messages;  // in flight
  Clock arriving, completed;
  std::vector<RemoteArrival> arrivals;  // of other blocks of the cluster, which count when this block runs next
  std::map<unsigned, Clock> arriving_of_others, completed_of_others;  // by rank
};

struct NamedBarrier {
  int expected = 0;
  std::vector<Thread*> waiting;
  std::vector<unsigned> arrived;  // threads that do not wait
  Clock clock;                    // what these knew
};

enum class LaneOrder : int { ascending, descending, random };

struct Options {
  LaneOrder order = LaneOrder::ascending;
  bool warp_skewed = false;  // one warp runs as far as it can before the next starts
  bool lazy_copies = true;   // copies land as late as the program allows; until then the destination is garbage
  bool checks = false;       // races, bounds, uninitialised reads (needs an instrumented build)
  bool programmatic_launch = false;
  long preempt_per_million = 0;
  double deadline_s = 0;     // 0 = none
};

struct Block {
  uint3 index;
  unsigned linear = 0, thread_count = 0, warp_count = 0;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::map<unsigned long long*, std::unique_ptr<Mbarrier>> mbarriers;
  NamedBarrier named_barriers[16];
  bool clocks_active = false;
  unsigned unfenced_writers = 0;
  bool barriers_published = true;  // false between mbarrier_init and mbarrier_init_fence
  uint32_t published_after = 0;    // cluster arrivals of the thread that fenced them, before it did
};

struct SharedRegion {
  char* low = nullptr;
  size_t bytes = 0;
  const char* name = "";
  bool contains(const void* address) const { return size_t(static_cast<const char*>(address) - low) < bytes; }
};

extern Options options;
extern Block block;
extern SharedRegion static_region, dynamic_region;
extern std::mt19937_64 random_source;
extern bool failed;

// True except while kernel code runs: then the deadline's signal may abandon the thread at any instruction. Every function that
// kernel code calls opens a RuntimeScope.
extern volatile bool in_runtime, deadline_passed;
void fail_on_deadline();
struct RuntimeScope {
  RuntimeScope() { in_runtime = true; }
  ~RuntimeScope() {
    if (deadline_passed) fail_on_deadline();
    in_runtime = false;
  }
};

inline Thread* self() { return static_cast<Thread*>(current); }
inline Warp& warp_of(const Thread* thread) { return block.warps[thread->warp]; }

// fibers.cpp
void run_until_nothing_is_runnable();  // called by the scheduler
void suspend();                        // called by a thread that waits; returns when it is resumed
void make_ready(Thread* thread);
[[noreturn]] void abandon_thread();    // after a failure: back to the scheduler for good
void reset_run_order();
void discard_fibers();

bool on_stack(const Thread* thread, const void* address);
void set_stacks(char* memory, size_t bytes_per_stack);
void set_kernel(KernelTrampoline kernel, void** arguments);

// clusters.cpp
void begin_cluster_launch(unsigned size);
void begin_cluster();
void activate_block(unsigned rank);     // makes it the global `block`, with its shared memory and its checks
void wake_cluster_waiters();            // of the active block
bool complete_cluster_phase();          // false if a live thread has not arrived
std::string describe_cluster_barrier();
unsigned cluster_size();
Block& block_of(unsigned rank);
char* shared_memory_of(unsigned rank, bool is_static);
void perform(const RemoteStore& store);
// Fails unless shared[0 .. bytes) is shared memory and block `rank` has it too, has started and not exited.
RemoteStore remote_store(const char* what, float* shared, unsigned bytes, unsigned rank);
bool allocate_dynamic_shared(size_t bytes);  // of the active block

// scheduler.cpp
extern char failure_text[1536];
void prepare_threads(dim3 grid, dim3 dim);
void run_cluster(uint3 first, dim3 grid);
// Records the first failure of the launch; does not return when a thread runs.
void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// messages.cpp
void land_message(Mbarrier& barrier, size_t which);  // of the active block
void land_all_messages();                            // of the active block
bool message_in_flight();                            // or a tile, or an arrival, to a block of the cluster that has not exited
// The barrier of block `rank` that lies where `address` lies in this block; fails where it may not be used yet.
Mbarrier* barrier_of(const char* what, unsigned rank, unsigned long long* address);

// warpgroups.cpp
void check_no_product_in_flight(const Thread* thread);  // at its end

// async_copies.cpp
bool land_one_copy();                  // a copy or message; false if nothing is in flight
Mbarrier* find_mbarrier(unsigned long long* address);  // of the active block; fails where it may not be used yet
void ask(Mbarrier& barrier, CopyRequest request);      // of the active block: lands at once, or late
void land_all_copies();                                // of the active block
void let_remote_arrivals_count();                      // at the active block's mbarriers
void complete_phase_if_done(Mbarrier& barrier);
std::string describe_mbarrier(const Mbarrier& barrier);
// By its cp.async, committed or not: what is brought and never waited for is a wait that counts wrongly. Copies that only write zeros do
// not count: they keep the number of groups right where nothing is left to bring.
bool copies_on_their_way(const Thread* thread);
void check_no_copy_in_flight();        // at the end of a block

// memory_checks.cpp
enum class Access : uint8_t { read, write };
struct AccessKind {
  Access access;
  bool atomic = false, must_be_aligned = false, before_dependency = false;
};
struct BufferSpec {  // one pointer argument; also the layout that Python passes
  const char* name;
  char* address;
  size_t bytes;
  int role;                 // BufferRole
  int written_by_the_chain; // by an earlier kernel that may still be running (programmatic dependent launch)
  int published;            // read by later kernels before their dependency wait (ac::load_hint)
};
enum BufferRole : int { role_read = 0, role_write = 1, role_read_write = 2 };
void check_access(const void* address, size_t bytes, AccessKind kind, const void* code);
void mark_in_flight(char* destination, size_t bytes);
void mark_landed(char* destination, size_t bytes, const Thread* writer);
void mark_bulk_landing(char* destination, size_t bytes, const Mbarrier& barrier);
void mark_mbarrier(unsigned long long* barrier);
void check_mbarrier_use(unsigned long long* barrier);  // ordered after its initialisation?
void add_constructor_guard(const char* guard);
void begin_launch_checks(const BufferSpec* buffers, int count);
void end_launch_checks();
void begin_block_checks();
void swap_block_checks(unsigned rank);  // exchanges the active block's state with the one kept for `rank`
// The product that the thread's warp asks for reads these bytes of shared memory until its group is waited for.
void check_product_read(const char* address, size_t bytes, const Thread* thread, uint32_t group, const void* code);
// A tile for block `rank`, which is not the active one.
void check_tile_for(unsigned rank, unsigned owner_linear, size_t offset, size_t bytes, const Mbarrier& barrier, const void* code);
// `barrier`: of the message's target; null for a store, which a cluster barrier publishes.
void check_remote_store(bool active, unsigned owner_linear, const RemoteStore& store, const Mbarrier* barrier, const Thread* writer,
                        const void* code);

// collectives.cpp
void activate_clocks();
size_t clock_entries();
void join(Clock& into, const Clock& from);
void release_to(Clock& into, Thread* from);
void acquire_from(const Clock& from, Thread* into);
void release_block_barrier();
const char* name_of(Collective kind);

}  // namespace emu
