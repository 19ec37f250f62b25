// Linear layers of the chosen experts, whose rows stream through a ring of bulk copies in shared memory (the "stream" schedules,
// sm_90+). What is computed, and all operands: see experts.cu. Rows of x and weight start at multiples of 16 bytes.
//
// The grid stays: Plan::blocks_per_sm blocks on every SM, and each has an even share of all rows of all slots (of the rows of n if
// summed, and of these every slot), so that no SM waits for a last wave. A block walks through its rows, one slot after the other, in
// stages of Plan::warps * Plan::rows rows (with their pair rows) times Plan::columns columns, whichever slots they belong to: only its
// last stage is short. One extra warp, the producer, brings x and then the stages: one copy for neighbouring rows of an expert
// where a stage holds whole rows, else one per row. Every consumer warp owns the same rows of every slot of the ring.
//
// The router says which matrices. Where it is the kernel in front, nothing can be asked for before the dependency wait. What follows is one
// load of the chosen experts, a lane per slot, and then copies until Plan::in_flight stages are on their way: no barrier of the block, no
// register and no second wave lies between the router's result and a full stream. Where it is part of this kernel (chosen.cuh) the producer
// chooses first: x waits in shared memory by then.
//
// Plan::early_experts (sums, behind gate and up): the producer takes what lies in `experts` before the wait for the choice, and asks for
// Plan::in_flight stages by it. It may be the last token's choice, or anything: if it names a matrix that does not exist, nothing is asked
// for. Behind the wait it is read again. If it differs, what is under way lands, its barriers end one more phase, which gives them the
// parity of new ones, and all stages are asked for again. Consumers see nothing of this: they touch the ring behind x_full alone, at which
// the producer arrives behind its decision. Plan::late_dependents (gate and up): blocks of the next kernel begin when all of this one know
// the choice, so that what they find in `experts` is right (docs/decisions/0051).
//
// Wins where experts are many rows of one token on sm_90 and later: 64 to 128 KB in flight per SM, whatever n and k are.
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>
#include <agentcompile/ring.cuh>

#include "plan.cuh"
#include "chosen.cuh"

namespace {

using Element = Plan::T;
using Vector = ac::Vec16<Element>;
constexpr int streams = Plan::rows * Plan::pair;  // weight rows that a warp sums at the same time
constexpr int consumers = Plan::warps * ac::warp_size;
constexpr int stage_rows = Plan::warps * Plan::rows;  // output rows per stage
constexpr int slot_elements = stage_rows * Plan::pair * Plan::columns;
constexpr int steps = Plan::columns / (ac::warp_size * Vector::size);  // vectors per lane and row of a stage
constexpr bool by_row = Plan::pair > 1 && Plan::interleaved;           // a row lies behind its pair row
static_assert(!(Plan::early_experts && Plan::routed), "who chooses has nothing to guess");
static_assert(Plan::threads == consumers + ac::warp_size, "one producer warp beside the consumers");
static_assert(stage_rows * Plan::pair <= ac::warp_size, "a lane of the producer asks for one copy of a stage at most");
using Ring = ac::Ring<Element, Plan::stages>;

// Absent operands are null.
struct Operands {
  const Element* x;
  const Element* weight;
  const long long* experts;
  const Element* bias;
  const Plan::Scale* scale;
  const Element* aux0;
  const Element* aux1;
  Plan::Out* out;
  Router<Plan> router;
  int n;
  int k;
  int slots;
};

// One row of one slot.
struct Task {
  int slot;
  int row;
};

// What a block computes: `count` tasks; `rows` of them from row `begin` on in every slot if summed, else those from `begin` on of all.
struct Share {
  int begin;
  int rows;
  int count;
  int n;

  __device__ __forceinline__ Task task(int number) const {
    if constexpr (Plan::summed) return Task{number / rows, begin + number % rows};
    return Task{(begin + number) / n, (begin + number) % n};
  }
  // Of a slot: the row behind the last one.
  __device__ __forceinline__ int end() const { return Plan::summed ? begin + rows : n; }
  __device__ __forceinline__ int first_row() const { return Plan::summed ? begin : 0; }
  // Rows of x that are staged begin with that of this slot (summed: of the first, since begin < n), and there are so many.
  __device__ __forceinline__ int first_x() const { return Plan::shared ? 0 : begin / n; }
  __device__ __forceinline__ int x_rows(int slots) const {
    if constexpr (Plan::shared) return 1;
    return Plan::summed ? slots : (begin + count - 1) / n - begin / n + 1;
  }
};

// Shares differ by one row at the most; the first blocks have the longer ones.
__device__ __forceinline__ Share share_of_block(int n, int slots) {
  const int total = Plan::summed ? n : n * slots;
  const int blocks = gridDim.x;
  const int block = blockIdx.x;
  const int each = total / blocks;
  const int longer = total % blocks;
  const int rows = each + (block < longer ? 1 : 0);
  return Share{block * each + min(block, longer), rows, Plan::summed ? rows * slots : rows, n};
}

// Row of an expert's matrix; place of a row of a stage in a slot of the ring.
__device__ __forceinline__ long long matrix_row(int row, int part, int n) {
  return by_row ? 2LL * row + part : row + static_cast<long long>(part) * n;
}
__device__ __forceinline__ int place(int row, int part) { return by_row ? 2 * row + part : part * stage_rows + row; }

// Distance between two rows of a slot: whole rows lie as in memory, column slices behind each other.
__device__ __forceinline__ int slot_pitch(int k) { return k <= Plan::columns ? k : Plan::columns; }

// A stage: `count` tasks from `first` on, columns [column, column + width).
struct Stage {
  int first;
  int count;
  int column;
  int width;
};

// Copies a stage into a slot of the ring; `chosen` is the expert of slot `lane`.
__device__ __forceinline__ void issue(const Operands& operands, const Share& share, const Stage& stage, Element* slot, ac::Mbarrier* full,
                                      long long chosen, int lane) {
  // The shuffle below comes between this and the copies.
  if (lane == 0) ac::mbarrier_arrive_expect_bytes(full, stage.count * Plan::pair * stage.width * sizeof(Element));
  const bool whole_rows = operands.k <= Plan::columns;
  const int pitch = slot_pitch(operands.k);
  const int index = lane / Plan::pair;
  const int part = lane % Plan::pair;
  const Task task = share.task(stage.first + index);
  const long long matrix = __shfl_sync(ac::full_warp, chosen, task.slot) * Plan::pair * operands.n;
  // Of whole rows only the first of an expert brings those behind it, and its pair rows where they lie between them.
  const bool begins = !whole_rows || ((index == 0 || task.row == share.first_row()) && !(by_row && part == 1));
  if (index < stage.count && begins) {
    const int rows = whole_rows ? min(stage.count - index, share.end() - task.row) * (by_row ? 2 : 1) : 1;
    const Element* from = operands.weight + (matrix + matrix_row(task.row, part, operands.n)) * operands.k + stage.column;
    ac::bulk_copy_to_shared_evict_first(slot + place(index, part) * pitch, from, rows * stage.width * sizeof(Element), full);
  }
}

// Lanes without a slot have no expert, so that whoever asks for it reads outside and is seen. Behind the dependency wait.
__device__ __forceinline__ long long expert_of(const Operands& operands, int lane, bool tells) {
  if constexpr (Plan::early_experts) {  // a block that has read them before asks the L2 again
    return lane < operands.slots ? ac::load_relaxed(operands.experts + lane) : -1;
  } else {
    return expert_of_slot(operands.router, operands.experts, operands.slots, lane, tells);
  }
}

// Asks for this block's stages but the first `asked`, which are on their way; if `Ahead`, for Plan::in_flight at the most. Says how many.
template <bool Ahead>
__device__ __forceinline__ int ask(const Operands& operands, const Share& share, Ring ring, long long chosen, int asked, int lane) {
  typename Ring::Position next, lagging;
  int issued = 0;
  for (int first = 0; first < share.count; first += stage_rows) {
    for (int column = 0; column < operands.k; column += Plan::columns) {
      if (Ahead && issued == Plan::in_flight) return issued;
      if (!Plan::early_experts || issued >= asked) {
        const Stage stage{first, min(stage_rows, share.count - first), column, min(Plan::columns, operands.k - column)};
        ring.template acquire<Plan::in_flight>(next, lagging, issued);
        issue(operands, share, stage, ring.slots + next.slot * slot_elements, ring.full + next.slot, chosen, lane);
      }
      next.advance();
      ++issued;
    }
  }
  return issued;
}

__device__ __forceinline__ void produce(const Operands& operands, const Share& share, Ring ring, Element* staged, ac::Mbarrier* x_full,
                                        int lane) {
  long long guessed = -1;
  int asked = 0;
  if constexpr (Plan::early_experts) {
    if (lane < operands.slots) guessed = ac::load_unsettled(operands.experts + lane);
    const bool exists = static_cast<unsigned long long>(guessed) < static_cast<unsigned long long>(operands.router.count);
    if (__all_sync(ac::full_warp, exists || lane >= operands.slots)) asked = ask<true>(operands, share, ring, guessed, 0, lane);
  }
  ac::grid_dependency_wait();
  if (lane == 0) {
    const unsigned bytes = share.x_rows(operands.slots) * operands.k * sizeof(Element);
    ac::mbarrier_arrive_expect_bytes(x_full, bytes);
    ac::bulk_copy_to_shared(staged, operands.x + static_cast<long long>(share.first_x()) * operands.k, bytes, x_full);
  }
  const long long chosen = expert_of(operands, lane, blockIdx.x == 0);
  if constexpr (Plan::pdl && Plan::late_dependents) ac::launch_dependents();
  if constexpr (Plan::early_experts) {
    if (__any_sync(ac::full_warp, chosen != guessed)) {
      ring.take_back(asked, lane);
      asked = 0;
    }
    if (lane == 0) ac::mbarrier_arrive(x_full);
  }
  ask<false>(operands, share, ring, chosen, asked, lane);
}

// What a warp does in one round, with lane r finishing its row r: `mine` rows are there, none if that is not positive; row r's x is `x[r]`.
struct Round {
  int mine;
  Task task;      // of this lane
  float scale;    // of its slot
  float bias[2];  // of its row and its pair row
  const Element* x[Plan::rows];
};

// Adds this warp's share of one stage to `sums`. `AllRows`: all of the warp's rows are there; then no branch parts the loads.
template <bool AllRows>
__device__ __forceinline__ void consume(const Round& round, const Element* slot_rows, int pitch, int first, int width, int lane,
                                        float (&sums)[streams]) {
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    const int column = (step * ac::warp_size + lane) * Vector::size;
    if (!Plan::full_stages && column >= width) break;
    float values[Vector::size];
#pragma unroll
    for (int number = 0; number < streams; ++number) {
      const int row = number / Plan::pair;
      if (!AllRows && row >= round.mine) continue;
      if (number % Plan::pair == 0) Vector::load(round.x[row] + first + column).unpack(values);
      float w[Vector::size];
      Vector::load(slot_rows + place(row, number % Plan::pair) * pitch + column).unpack(w);
#pragma unroll
      for (int element = 0; element < Vector::size; ++element) sums[number] = fmaf(w[element], values[element], sums[number]);
    }
  }
}

// `chosen` and `scale` are those of slot `lane`. Biases are asked for before the round's first stage is waited for.
__device__ __forceinline__ Round round_of(const Operands& operands, const Share& share, const Element* staged, int own, long long chosen,
                                          float scale, int lane) {
  Round round{};
  round.mine = min(Plan::rows, share.count - own);
  round.task = share.task(own + lane);
  if constexpr (Plan::summed) round.scale = __shfl_sync(ac::full_warp, scale, round.task.slot);
  if constexpr (Plan::has_bias) {
    const long long matrix = __shfl_sync(ac::full_warp, chosen, round.task.slot) * Plan::pair * operands.n;
#pragma unroll
    for (int part = 0; part < Plan::pair; ++part) {
      if (lane < round.mine) round.bias[part] = ac::to_float(operands.bias[matrix + matrix_row(round.task.row, part, operands.n)]);
    }
  }
#pragma unroll
  for (int row = 0; row < Plan::rows; ++row) {
    const int slot = Plan::shared ? 0 : __shfl_sync(ac::full_warp, round.task.slot, row) - share.first_x();
    round.x[row] = staged + static_cast<long long>(slot) * operands.k;
  }
  return round;
}

// Lane r of a warp has its row r: what is summed over slots is kept for that, all else is finished.
__device__ __forceinline__ void keep(const Operands& operands, const Round& round, const float (&sums)[streams], float* kept, int own,
                                     int lane) {
  float acc[Plan::pair] = {};
#pragma unroll
  for (int number = 0; number < streams; ++number) {
    const float sum = ac::warp_sum(sums[number]);
    if (number / Plan::pair == lane) acc[number % Plan::pair] = sum;
  }
  if (lane >= round.mine) return;
#pragma unroll
  for (int part = 0; part < Plan::pair; ++part) acc[part] += round.bias[part];
  if constexpr (Plan::summed) {
    kept[own + lane] = round.scale * acc[0];
  } else {
    const float aux[2] = {};
    operands.out[static_cast<long long>(round.task.slot) * operands.n + round.task.row] =
        ac::from_float<Plan::Out>(Epilogue::apply(acc, aux));
  }
}

// A thread per row: no share has more rows than a block has consumers. `aux` is that row's.
__device__ __forceinline__ void finish(const Operands& operands, const Share& share, const float* kept, const float (&aux)[2]) {
  const int row = threadIdx.x;
  if (row >= share.rows) return;
  float acc[1] = {};
  for (int slot = 0; slot < operands.slots; ++slot) acc[0] += kept[slot * share.rows + row];
  operands.out[share.begin + row] = ac::from_float<Plan::Out>(Epilogue::apply(acc, aux));
}

__device__ __forceinline__ void consume_all(const Operands& operands, const Share& share, Ring ring, const Element* staged,
                                            ac::Mbarrier* x_full, float* kept, int lane) {
  ac::grid_dependency_wait();
  const int warp = threadIdx.x / ac::warp_size;
  const long long chosen = Plan::has_bias ? expert_of(operands, lane, false) : 0;
  const float scale = Plan::summed && lane < operands.slots ? ac::to_float(operands.scale[lane]) : 0.0f;
  float aux[2] = {};
  const bool finishes = Plan::summed && threadIdx.x < share.rows;
  if (Plan::has_aux0 && finishes) aux[0] = ac::to_float(operands.aux0[share.begin + threadIdx.x]);
  if (Plan::has_aux1 && finishes) aux[1] = ac::to_float(operands.aux1[share.begin + threadIdx.x]);

  const int pitch = slot_pitch(operands.k);
  typename Ring::Position current;
  ac::mbarrier_wait(x_full, 0);
  for (int first = 0; first < share.count; first += stage_rows) {
    const int own = first + warp * Plan::rows;
    const Round round = round_of(operands, share, staged, own, chosen, scale, lane);
    float sums[streams] = {};
    for (int column = 0; column < operands.k; column += Plan::columns) {
      ring.wait_full(current);
      const Element* slot_rows = ring.slots + current.slot * slot_elements + place(warp * Plan::rows, 0) * pitch;
      if (round.mine == Plan::rows) {
        consume<true>(round, slot_rows, pitch, column, operands.k - column, lane, sums);
      } else {
        consume<false>(round, slot_rows, pitch, column, operands.k - column, lane, sums);
      }
      __syncwarp();
      if (lane == 0) ring.release(current);
      current.advance();
    }
    keep(operands, round, sums, kept, own, lane);
  }
  if constexpr (Plan::summed) {
    ac::named_barrier_sync(1, consumers);
    finish(operands, share, kept, aux);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm)
experts_kernel(const Plan::T* x, const Plan::T* weight, const long long* experts, const Plan::T* bias, const Plan::Scale* scale,
               const Plan::T* aux0, const Plan::T* aux1, Plan::Out* out, const Plan::Logit* logits, const Plan::RouterBias* router_bias,
               Plan::Score* scores, long long* choice, int n, int k, int slots, int matrices, float eps, float factor) {
  __shared__ ac::Mbarrier full[Plan::stages];
  __shared__ ac::Mbarrier empty[Plan::stages];
  __shared__ ac::Mbarrier x_full;
  AC_DYNAMIC_SHARED(Element, ring_slots);
  if constexpr (Plan::pdl && !Plan::late_dependents) ac::launch_dependents();

  const Router<Plan> router{logits, router_bias, scores, choice, matrices, eps, factor};
  const Operands operands{x, weight, experts, bias, scale, aux0, aux1, out, router, n, k, slots};
  const Share share = share_of_block(n, slots);
  const Ring ring{ring_slots, full, empty};
  Element* staged = ring_slots + Plan::stages * slot_elements;
  float* kept = reinterpret_cast<float*>(staged + static_cast<long long>(share.x_rows(slots)) * k);
  if (threadIdx.x == 0) {
    ac::mbarrier_init(&x_full, Plan::early_experts ? 2 : 1);  // x is there; the choice is known
    ring.init(Plan::warps);
  }
  __syncthreads();
  if (threadIdx.x >= consumers) {
    produce(operands, share, ring, staged, &x_full, threadIdx.x % ac::warp_size);
  } else {
    consume_all(operands, share, ring, staged, &x_full, kept, threadIdx.x % ac::warp_size);
  }
}
