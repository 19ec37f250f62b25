// Histories of accesses, byte by byte, and whether two accesses are ordered.
#pragma once
#include <type_traits>

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
// A product of a warpgroup only reads: `thread` is max_threads + max_mbarriers + 1 + its warp, `time` its group.
inline uint16_t product_of(unsigned warp) { return uint16_t(max_threads + max_mbarriers + 1 + warp); }
// A message of the cluster has the stamp of a copy on the mbarrier of its target, and this for `cluster_arrivals`.
constexpr uint16_t of_message = 0xffff;
inline bool is_message(const Stamp& stamp) {
  return stamp.thread > max_threads && stamp.thread != cluster_remote && stamp.cluster_arrivals == of_message;
}
enum class Content : uint32_t { uninitialised, valid, in_flight, mbarrier };
struct Cell {
  Stamp write, read, other_read;  // two readers: the first, and the latest of another thread (of another warp if there is one)
  uint32_t owner_block : 30 = 0;  // shared memory: cells of an earlier block count as empty
  Content content : 2 = Content::uninitialised;
};
static_assert(sizeof(Cell) == 64 && std::has_unique_object_representations_v<Cell>, "cells are compared as bytes, of one cache line");

inline bool have_equal_histories(const Cell& one, const Cell& other) {
  using Lanes = uint64_t __attribute__((vector_size(16)));
  Lanes ones[4], others[4];
  std::memcpy(ones, &one, sizeof ones);
  std::memcpy(others, &other, sizeof others);
  const Lanes differing = ((ones[0] ^ others[0]) | (ones[1] ^ others[1])) | ((ones[2] ^ others[2]) | (ones[3] ^ others[3]));
  return !(differing[0] | differing[1]);
}

// Visits the cells of one access with their places in it. Bytes of an access mostly share their history: a cell that is equal to the one
// before it becomes what that one has become, without a visit.
template <class Visit>
inline void each_cell(Cell* cells, size_t count, Visit visit) {
  Cell before;
  for (size_t i = 0; i < count; ++i) {
    if (i && have_equal_histories(cells[i], before)) {
      cells[i] = cells[i - 1];
      continue;
    }
    before = cells[i];
    visit(cells[i], i);
  }
}

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

struct BlockChecks {  // of one block, put aside with it
  std::vector<Cell> static_cells, dynamic_cells;
  std::vector<Acquisition> acquired;
};
extern BlockChecks checks;
extern std::vector<BlockChecks> parked_checks;  // by rank in the cluster

std::string place(const void* code);  // for messages; Python turns it into file and line
std::string describe(const Stamp& stamp);
const char* verb(Access access);

Stamp stamp_of(const Thread* thread);
bool ordered_in_block(const Thread* thread, const Stamp& earlier);
bool ordered(const Thread* thread, const Stamp& earlier);
// Compares one byte's history with an access by `thread` and adds it as `now`; where = "dynamic shared memory", "argument 'x'".
void check_order(const Thread* thread, Cell& cell, AccessKind kind, const char* where, size_t offset, const void* code, const Stamp& now);
void forget_publications();  // at the start of a launch

// shared_memory_checks.cpp
void check_shared(Thread* thread, const char* address, size_t bytes, AccessKind kind, const void* code);

}  // namespace emu
