// Matrix-vector product for one token, weights through a ring of bulk copies in shared memory (the "ring" schedules, sm_90+).
// What is computed, and the operands' layouts: see gemv_common.cuh. Rows of x, weight and the norm start at multiples of 16 bytes.
//
// Each block walks through its rows in stages: Plan::warps *
// Plan::rows output rows (with their pair rows) times Plan::columns columns. One extra warp, the producer, fetches stages
// in order into a ring of Plan::stages slots: one bulk copy where a stage holds whole rows, since consecutive rows are
// contiguous, else one per row. It starts before the grid dependency wait, so the ring is full, or on its way, when the
// previous kernel of the chain ends; and it never has more than Plan::in_flight stages on their way, because requests
// queued deeper only delay the next kernel's input. Every consumer warp owns the same rows of every slot.
//
// Rows may be dealt (Plan::static_groups > 0): each block begins with so many groups of stage_rows rows, which fill its ring before the
// dependency wait; behind it groups go to whoever asks next, so that blocks end together although they start apart. `tickets` counts
// them, is asked only behind the wait, when no earlier kernel can hold one, and is zero again behind the last. Sums are those of any deal.
//
// Wins for all long weight streams on sm_90 and later: two blocks per SM, 8 consumer warps, 64-80 KB in flight per SM.
#include <agentcompile/ring.cuh>

#include "gemv_common.cuh"

namespace {

using Vector = ac::Vec16<Element>;
constexpr int consumers = Plan::warps * ac::warp_size;
constexpr int stage_rows = Plan::warps * Plan::rows;  // output rows per stage
constexpr int slot_elements = stage_rows * Plan::pair * Plan::columns;
constexpr int steps = Plan::columns / (ac::warp_size * Vector::size);  // vectors per lane and row of a stage
static_assert(Plan::threads == consumers + ac::warp_size, "one producer warp beside the consumers");
using Ring = ac::Ring<Element, Plan::stages>;
constexpr bool dealt = Plan::static_groups > 0;
constexpr int consumers_meet = 1, ring_is_there = 2;  // barriers by name
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

// Adds this warp's share of one stage to `sums`: `slot_rows` are the warp's rows of the slot, `x` the stage's columns.
// `AllRows`: none of the warp's rows lies beyond the block's range; then no branch parts the loads.
template <bool AllRows>
__device__ __forceinline__ void consume(const Element* slot_rows, const Element* x, int pitch, int width, int rows_left,
                                        int lane, float (&sums)[streams]) {
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    const int column = (step * ac::warp_size + lane) * Vector::size;
    if (!Plan::full_stages && column >= width) break;
    float values[Vector::size];
    Vector::load(x + column).unpack(values);
#pragma unroll
    for (int number = 0; number < streams; ++number) {
      const int row = number / Plan::pair;
      if (!AllRows && row >= rows_left) continue;
      float w[Vector::size];
      Vector::load(slot_rows + ((number % Plan::pair) * stage_rows + row) * pitch + column).unpack(w);
#pragma unroll
      for (int element = 0; element < Vector::size; ++element) {
        sums[number] = fmaf(w[element], values[element], sums[number]);
      }
    }
  }
}

// One group: sums of this warp's rows from `row` on, of which those below `end` exist. The first slot has been waited for if `Waited`.
template <bool Waited>
__device__ __forceinline__ void consume_group(const Operands& operands, Ring ring, Ring::Position& current, const Element* staged, int row,
                                              int end, int warp, int lane, float (&sums)[streams]) {
  const int pitch = slot_pitch(operands.k);
  for (int column = 0; column < operands.k; column += Plan::columns) {
    if (!Waited || column > 0) ring.wait_full(current);
    const Element* slot_rows = ring.slots + current.slot * slot_elements + warp * Plan::rows * pitch;
    if (row + Plan::rows <= end) {
      consume<true>(slot_rows, staged + column, pitch, operands.k - column, Plan::rows, lane, sums);
    } else {
      consume<false>(slot_rows, staged + column, pitch, operands.k - column, end - row, lane, sums);
    }
    __syncwarp();
    if (lane == 0) ring.release(current);
    current.advance();
  }
}

__device__ __forceinline__ void consume_all(const Operands& operands, Ring ring, RowRange range, const int* group_of, Element* staged,
                                            float* scratch, int warp, int lane) {
  const int vectors = operands.k / Vector::size;
  ac::RowStage<Plan::norm, consumers, Plan::held_vectors, Element, Vector, Plan::X> stage;
  stage.prefetch(operands.norm_weight, operands.norm_bias, vectors, threadIdx.x);
  const auto before = before_norm<Vector, consumers>(operands, vectors, threadIdx.x);

  ac::grid_dependency_wait();
  Aux aux = load_aux(operands, range.begin + warp * Plan::rows, dealt ? range.begin : range.end, lane);  // dealt rows are not known yet
  stage.run(operands.x, operands.norm_weight, operands.norm_bias, staged, vectors, vectors, operands.norm_eps, scratch,
            threadIdx.x, ConsumerBarrier{}, before);
  write_normed<Vector, consumers>(operands, staged, vectors, threadIdx.x);

  Ring::Position current;
  if constexpr (dealt) {
    while (true) {
      ring.wait_full(current);
      const int group = group_of[current.slot];
      if (group == over) break;
      const int row = group * stage_rows + warp * Plan::rows;
      aux = load_aux(operands, row, operands.n, lane);
      float sums[streams] = {};
      consume_group<true>(operands, ring, current, staged, row, operands.n, warp, lane, sums);
      sum_lanes(sums);
      if (lane < Plan::rows && row + lane < operands.n) operands.out[row + lane] = result_of(sums, aux, lane);
    }
  } else {
    for (int block_row = range.begin; block_row < range.end; block_row += stage_rows) {
      const int row = block_row + warp * Plan::rows;
      float sums[streams] = {};
      consume_group<false>(operands, ring, current, staged, row, range.end, warp, lane, sums);
      sum_lanes(sums);
      if (lane < Plan::rows && row + lane < range.end) operands.out[row + lane] = result_of(sums, aux, lane);
      aux = load_aux(operands, row + stage_rows, range.end, lane);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm)
gemv_kernel(const Plan::X* x, const Plan::T* weight, const Plan::T* norm_weight, const Plan::T* norm_bias,
            const Plan::A0* aux0, const Plan::A1* aux1, Plan::Out* out, Plan::T* norm_out, const Plan::T* residual,
            const Plan::T* post_weight, Plan::T* residual_out, unsigned int* tickets, int n, int rows_each, int k, float norm_eps, float post_eps) {
  __shared__ float scratch[Plan::warps];
  __shared__ ac::Mbarrier full[Plan::stages];
  __shared__ ac::Mbarrier empty[Plan::stages];
  __shared__ int group_of[dealt ? Plan::stages : 1];
  AC_DYNAMIC_SHARED(Element, slots);
  if constexpr (Plan::pdl) ac::launch_dependents();

  const Operands operands{x, weight, norm_weight, norm_bias, aux0, aux1, out, norm_out, residual, post_weight,
                          residual_out, post_eps, n, rows_each, Plan::k > 0 ? Plan::k : k, norm_eps};
  const Ring ring{slots, full, empty};
  Element* staged = slots + Plan::stages * slot_elements;
  const int warp = threadIdx.x / ac::warp_size;
  const int lane = threadIdx.x % ac::warp_size;
  const RowRange range = rows_of_block(n, rows_each);
  if (warp < Plan::warps) {
    ac::named_barrier_sync(ring_is_there, Plan::threads);
    consume_all(operands, ring, range, group_of, staged, scratch, warp, lane);
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
