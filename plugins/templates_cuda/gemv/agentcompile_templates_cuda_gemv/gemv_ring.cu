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

// Distance between two rows of a slot: whole rows lie as in memory, column slices behind each other.
__device__ __forceinline__ int slot_pitch(int k) { return k <= Plan::columns ? k : Plan::columns; }

struct ConsumerBarrier {
  __device__ __forceinline__ void operator()() const { ac::named_barrier_sync(1, consumers); }
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

__device__ __forceinline__ void consume_all(const Operands& operands, Ring ring, RowRange range, Element* staged,
                                            float* scratch, int warp, int lane) {
  const int vectors = operands.k / Vector::size;
  const int pitch = slot_pitch(operands.k);
  ac::RowStage<Plan::norm, consumers, Plan::held_vectors, Element, Vector> stage;
  stage.prefetch(operands.norm_weight, operands.norm_bias, vectors, threadIdx.x);

  ac::grid_dependency_wait();
  float aux[2];
  load_aux(operands, range.begin + warp * Plan::rows, range.end, lane, aux);
  stage.run(operands.x, operands.norm_weight, operands.norm_bias, staged, vectors, vectors, operands.norm_eps, scratch,
            threadIdx.x, ConsumerBarrier{});

  Ring::Position current;
  for (int block_row = range.begin; block_row < range.end; block_row += stage_rows) {
    const int row = block_row + warp * Plan::rows;
    float sums[streams] = {};
    for (int column = 0; column < operands.k; column += Plan::columns) {
      ring.wait_full(current);
      const Element* slot_rows = ring.slots + current.slot * slot_elements + warp * Plan::rows * pitch;
      if (row + Plan::rows <= range.end) {
        consume<true>(slot_rows, staged + column, pitch, operands.k - column, Plan::rows, lane, sums);
      } else {
        consume<false>(slot_rows, staged + column, pitch, operands.k - column, range.end - row, lane, sums);
      }
      __syncwarp();
      if (lane == 0) ring.release(current);
      current.advance();
    }
    sum_lanes(sums);
    if (lane < Plan::rows && row + lane < range.end) operands.out[row + lane] = result_of(sums, aux, lane);
    load_aux(operands, row + stage_rows, range.end, lane, aux);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm)
gemv_kernel(const Plan::T* x, const Plan::T* weight, const Plan::T* norm_weight, const Plan::T* norm_bias,
            const Plan::T* aux0, const Plan::T* aux1, Plan::Out* out, int n, int k, float norm_eps) {
  __shared__ float scratch[Plan::warps];
  __shared__ ac::Mbarrier full[Plan::stages];
  __shared__ ac::Mbarrier empty[Plan::stages];
  AC_DYNAMIC_SHARED(Element, slots);
  if constexpr (Plan::pdl) ac::launch_dependents();

  const Operands operands{x, weight, norm_weight, norm_bias, aux0, aux1, out, n, Plan::k > 0 ? Plan::k : k, norm_eps};
  const Ring ring{slots, full, empty};
  Element* staged = slots + Plan::stages * slot_elements;
  const int warp = threadIdx.x / ac::warp_size;
  const int lane = threadIdx.x % ac::warp_size;
  const RowRange range = rows_of_block(n);
  if (threadIdx.x == 0) ring.init(Plan::warps);
  __syncthreads();
  if (warp == Plan::warps) {
    produce(operands, ring, range, lane);
  } else {
    consume_all(operands, ring, range, staged, scratch, warp, lane);
  }
}
