// Weights through a ring of bulk copies in shared memory (sm_90+): what the kernels share that differ in how they multiply. What is
// computed, and the operands' layouts: see gemv_common.cuh. Rows of x, weight and the norm start at multiples of 16 bytes.
//
// Each block walks through its rows in stages: Plan::warps * Plan::rows output rows (with their pair rows) times Plan::columns columns.
// One extra warp, the producer, fetches stages in order into a ring of Plan::stages slots: one bulk copy where a stage holds whole rows,
// since consecutive rows are contiguous, else one per row. It starts before the grid dependency wait, so the ring is full, or on its way,
// when the previous kernel of the chain ends; and it never has more than Plan::in_flight stages on their way, because requests queued
// deeper only delay the next kernel's input.
//
// Rows may be dealt (Plan::static_groups > 0): each block begins with so many groups of stage_rows rows, which fill its ring before the
// dependency wait; behind it groups go to whoever asks next, so that blocks end together although they start apart. `tickets` counts
// them, is asked only behind the wait, when no earlier kernel can hold one, and is zero again behind the last. Sums are those of any deal.
#pragma once
#include <agentcompile/ring.cuh>

#include "gemv_common.cuh"

namespace {

using Vector = ac::Vec16<Element>;
constexpr int consumers = Plan::warps * ac::warp_size;
constexpr int stage_rows = Plan::warps * Plan::rows;  // output rows per stage
constexpr int slot_elements = stage_rows * Plan::pair * Plan::columns;
static_assert(Plan::threads == consumers + ac::warp_size, "one producer warp beside the consumers");
using Ring = ac::Ring<Element, Plan::stages>;
constexpr bool dealt = Plan::static_groups > 0;
constexpr int consumers_meet = 1, ring_is_there = 2;  // barriers by name
template <bool Value> struct Is { static constexpr bool value = Value; };
constexpr int over = -1;  // in the place of a group: there are no more

// Distance between two rows of a slot: whole rows lie as in memory, column slices behind each other.
__device__ __forceinline__ int slot_pitch(int k) { return k <= Plan::columns ? k : Plan::columns; }

struct ConsumerBarrier {
  __device__ __forceinline__ void operator()() const { ac::named_barrier_sync(consumers_meet, consumers); }
};

// Copies columns [column, column + width) of `count` output rows from `row` on, and of their pair rows, into a slot.
__device__ __forceinline__ void issue(const Operands& operands, Element* slot, ac::Mbarrier* full, int row, int count,
                                      int column, int width, int lane) {
  if (lane == 0) ac::mbarrier_arrive_expect_bytes(full, count * Plan::pair * width * sizeof(Element));
  __syncwarp();
  const bool whole_rows = operands.k <= Plan::columns;
  const int pitch = slot_pitch(operands.k);
  const int copies = whole_rows ? Plan::pair : count * Plan::pair;
#pragma unroll 1
  for (int copy = lane; copy < copies; copy += ac::warp_size) {
    const int rows_per_copy = whole_rows ? count : 1;
    const int first = copy * rows_per_copy;
    const int half = Plan::pair > 1 && first >= count ? 1 : 0;  // 0: gate rows, 1: up rows
    const int offset = first - half * count;
    const long long weight_row = row + offset + static_cast<long long>(half) * operands.n;
    ac::bulk_copy_to_shared_evict_first(slot + (half * stage_rows + offset) * pitch,
                                        operands.weight + weight_row * operands.k + column,
                                        rows_per_copy * width * sizeof(Element), full);
  }
}

__device__ __forceinline__ void produce(const Operands& operands, Ring ring, RowRange range, int lane) {
  Ring::Position next;
  Ring::Position lagging;
  int issued = 0;
  for (int row = range.begin; row < range.end; row += stage_rows) {
    const int count = min(stage_rows, range.end - row);
    for (int column = 0; column < operands.k; column += Plan::columns) {
      ring.acquire<Plan::in_flight>(next, lagging, issued);
      issue(operands, ring.slots + next.slot * slot_elements, ring.full + next.slot, row, count, column,
            min(Plan::columns, operands.k - column), lane);
      next.advance();
      ++issued;
    }
  }
  ac::grid_dependency_wait();
}

// Asks for the next group that nobody has: lane 0 has its ticket when it uses it. Every block asks until it is told that there are no
// more, so the count has come round to zero when the last one has asked. By all lanes of the producer.
__device__ __forceinline__ unsigned int ask(unsigned int* tickets, int dealt_groups, int lane) {
  return lane == 0 ? atomicInc(tickets, dealt_groups + gridDim.x - 1) : 0u;
}

// As `produce`, of dealt rows; `group_of` tells the consumers which group a slot holds.
__device__ __forceinline__ void produce_dealt(const Operands& operands, Ring ring, int* group_of, unsigned int* tickets, int lane) {
  Ring::Position next;
  Ring::Position lagging;
  int issued = 0;
  const int groups = (operands.n + stage_rows - 1) / stage_rows;
  const int first = gridDim.x * Plan::static_groups;  // that is dealt
  int group = blockIdx.x * Plan::static_groups;
  for (int number = 1; group != over; ++number) {
    unsigned int ticket = 0;
    if (number > Plan::static_groups) ticket = ask(tickets, groups - first, lane);  // is under way while this group is issued
    const int row = group * stage_rows;
    const int count = min(stage_rows, operands.n - row);
    for (int column = 0; column < operands.k; column += Plan::columns) {
      ring.acquire<Plan::in_flight>(next, lagging, issued);
      if (lane == 0) group_of[next.slot] = group;
      issue(operands, ring.slots + next.slot * slot_elements, ring.full + next.slot, row, count, column,
            min(Plan::columns, operands.k - column), lane);
      next.advance();
      ++issued;
    }
    if (number < Plan::static_groups) {
      ++group;
      continue;
    }
    if (number == Plan::static_groups) {
      ac::grid_dependency_wait();
      ticket = ask(tickets, groups - first, lane);
    }
    const int given = first + static_cast<int>(__shfl_sync(0xffffffffu, ticket, 0));
    group = given < groups ? given : over;
  }
  ring.acquire<Plan::in_flight>(next, lagging, issued);
  if (lane == 0) {
    group_of[next.slot] = over;
    ac::mbarrier_arrive(ring.full + next.slot);
  }
}

// Where the rows of this block begin and end.
__device__ __forceinline__ int first_row(RowRange range) {
  return dealt ? static_cast<int>(blockIdx.x) * Plan::static_groups * stage_rows : range.begin;
}
__device__ __forceinline__ int last_row(const Operands& operands, RowRange range) { return dealt ? operands.n : range.end; }

// By all consumers: brings the row into shared memory, where its vectors lie as `Laid` says. `behind_wait` is what else may be asked for as
// soon as it is there.
template <class Laid, class BehindWait>
__device__ __forceinline__ void stage_row(const Operands& operands, Element* staged, float* scratch, BehindWait behind_wait) {
  const int vectors = operands.k / Vector::size;
  ac::RowStage<Plan::norm, consumers, Plan::held_vectors, Element, Vector, Plan::X, Laid> stage;
  stage.prefetch(operands.norm_weight, operands.norm_bias, vectors, threadIdx.x);
  const auto before = before_norm<Vector, consumers>(operands, vectors, threadIdx.x);

  ac::grid_dependency_wait();
  behind_wait();
  stage.run(operands.x, operands.norm_weight, operands.norm_bias, staged, vectors, vectors, operands.norm_eps, scratch,
            threadIdx.x, ConsumerBarrier{}, before);
  write_normed<Vector, consumers, Laid>(operands, staged, vectors, threadIdx.x);
}

// Calls each(row, end, number, waited) for every group of this block: its rows from `row` on, of which those below `end` exist; whether
// its first slot has been waited for.
template <class Each>
__device__ __forceinline__ void for_groups(const Operands& operands, Ring ring, const Ring::Position& current, RowRange range,
                                           const int* group_of, Each each) {
  if constexpr (dealt) {
    for (int number = 0;; ++number) {
      ring.wait_full(current);
      const int group = group_of[current.slot];
      if (group == over) break;
      each(group * stage_rows, operands.n, number, Is<true>{});
    }
  } else {
    int number = 0;
    for (int row = range.begin; row < range.end; row += stage_rows, ++number) each(row, range.end, number, Is<false>{});
  }
}

// A block: the producer, and `consume(ring, range, warp, lane)` by every other warp.
template <class Consume>
__device__ __forceinline__ void run_block(const Operands& operands, Ring ring, int* group_of, unsigned int* tickets, Consume consume) {
  const int warp = threadIdx.x / ac::warp_size;
  const int lane = threadIdx.x % ac::warp_size;
  const RowRange range = rows_of_block(operands.n, operands.rows_each);
  if (warp < Plan::warps) {
    ac::named_barrier_sync(ring_is_there, Plan::threads);
    consume(range, warp, lane);
    return;
  }
  // The producer asks for its first stages without waiting for the others.
  if (lane == 0) ring.init(Plan::warps);
  __syncwarp();
  ac::named_barrier_arrive(ring_is_there, Plan::threads);
  if constexpr (dealt) {
    produce_dealt(operands, ring, group_of, tickets, lane);
  } else {
    produce(operands, ring, range, lane);
  }
}

}  // namespace
