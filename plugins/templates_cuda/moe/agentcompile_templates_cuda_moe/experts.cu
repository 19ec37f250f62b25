// Linear layers of the experts that were chosen for one token; the matrices of the others are not read.
//
//   out[s, i] = Epilogue::apply(acc), acc[p] = dot(weight[e, row(i, p), :], x[s]) + bias[e, row(i, p)], e = experts[s]
//   out[i] = Epilogue::apply(acc, aux), acc[0] = sum over s of scale[s] * (dot(weight[e, i, :], x[s]) + bias[e, i])   if Plan::summed
//
// x [slots, k], or [k] if Plan::shared; weight [experts, pair * n, k]; experts [slots]; bias [experts, pair * n]; scale [slots];
// aux [n]; row(i, p) is p * n + i, or 2 * i + p if Plan::interleaved. fp32 accumulation, nothing is rounded before the result.
// Plan::routed: there is no `experts`; choice [slots] and scores [slots] are written as the router would (chosen.cuh).
//
// Grid (tiles of Plan::tile rows, slots; 1 if summed). A warp takes Plan::rows rows of one slot at a time, with their pair rows, and
// keeps rows * pair * unroll 16-byte loads in flight: a register is filled again, for its next rows at the latest, as soon as it is
// consumed. Sums meet in shared memory, where the slots are added up in their order. Nothing can be asked for before the dependency
// wait, since the router says which matrices; x is a few rows that stay in L1.
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>
#include <agentcompile/row.cuh>

#include "plan.cuh"
#include "chosen.cuh"

static_assert(Plan::tile <= Plan::threads, "a thread finishes one row at most");

namespace {

using Element = Plan::T;
constexpr int streams = Plan::rows * Plan::pair;  // weight rows that are summed at the same time
constexpr int most_slots = 32;

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
  int n;
  int k;
};

// What a block computes: rows [begin, begin + count) of the slots [slot, slot + slots).
struct Part {
  int begin;
  int count;
  int slot;
  int slots;
  const long long* chosen;  // of these slots
  float* sums;              // [slots, pair, count]
};

__device__ __forceinline__ long long matrix_row(int output, int part, int n) {
  return Plan::interleaved ? 2LL * output + part : output + static_cast<long long>(part) * n;
}

template <class Vector> __device__ __forceinline__ Vector stream(const Element* address) {
  if constexpr (Vector::size > 1) {
    return Vector{ac::load_stream16(address)};
  } else {
    return Vector::load(address);
  }
}

template <class Vector> struct Layer {
  static constexpr int step = Plan::unroll * ac::warp_size;  // vectors of a row that a warp covers at once

  // Rows [row, row + Plan::rows) of one slot, as far as the block's.
  struct Task {
    const Element* matrix;
    const Element* x;
    int row;
    int slot;
  };

  Operands operands;
  Part part;
  int vectors;  // per row
  Vector weights[streams][Plan::unroll];

  __device__ __forceinline__ Task task_of(int number, int per_slot) const {
    const int slot = number / per_slot;
    if (slot >= part.slots) return Task{operands.weight, operands.x, part.begin + part.count, slot};
    const long long matrix = part.chosen[slot] * Plan::pair * operands.n * operands.k;
    const long long x = Plan::shared ? 0 : static_cast<long long>(part.slot + slot) * operands.k;
    return Task{operands.weight + matrix, operands.x + x, part.begin + number % per_slot * Plan::rows, slot};
  }

  __device__ __forceinline__ Vector fetch(const Task& task, int vector, int number) const {
    const int output = task.row + number / Plan::pair;
    if (output >= part.begin + part.count || vector >= vectors) return Vector::zero();
    return stream<Vector>(task.matrix + matrix_row(output, number % Plan::pair, operands.n) * operands.k + vector * Vector::size);
  }

  // Consumes the vectors held in registers and fills each register with what `next` needs from vector `next_first` on.
  __device__ __forceinline__ void multiply(const Task& task, int first, const Task& next, int next_first, float (&sums)[streams]) {
#pragma unroll
    for (int u = 0; u < Plan::unroll; ++u) {
      const int vector = first + u * ac::warp_size;
      float x[Vector::size];
      (vector < vectors ? Vector::load(task.x + vector * Vector::size) : Vector::zero()).unpack(x);
#pragma unroll
      for (int number = 0; number < streams; ++number) {
        float w[Vector::size];
        weights[number][u].unpack(w);
        weights[number][u] = fetch(next, next_first + u * ac::warp_size, number);
#pragma unroll
        for (int element = 0; element < Vector::size; ++element) sums[number] = fmaf(w[element], x[element], sums[number]);
      }
    }
  }

  __device__ __forceinline__ void keep(const Task& task, const float (&sums)[streams]) const {
#pragma unroll
    for (int number = 0; number < streams; ++number) {
      const int row = task.row - part.begin + number / Plan::pair;
      if (row < part.count) part.sums[(task.slot * Plan::pair + number % Plan::pair) * part.count + row] = sums[number];
    }
  }

  __device__ __forceinline__ void run(int warp, int lane) {
    const int per_slot = (part.count + Plan::rows - 1) / Plan::rows;
    Task task = task_of(warp, per_slot);
#pragma unroll
    for (int number = 0; number < streams; ++number) {
#pragma unroll
      for (int u = 0; u < Plan::unroll; ++u) weights[number][u] = fetch(task, lane + u * ac::warp_size, number);
    }
    for (int number = warp; number < per_slot * part.slots; number += Plan::warps) {
      const Task next = task_of(number + Plan::warps, per_slot);
      float sums[streams] = {};
      for (int start = 0; start < vectors; start += step) {
        const bool last = start + step >= vectors;
        multiply(task, lane + start, last ? next : task, last ? lane : lane + start + step, sums);
      }
#pragma unroll
      for (int each = 0; each < streams; ++each) sums[each] = ac::warp_sum(sums[each]);
      if (lane == 0) keep(task, sums);
      task = next;
    }
  }
};

// Sum `pair` of row `row` of the block in one of its slots, with the bias.
__device__ __forceinline__ float layer_of(const Operands& operands, const Part& part, int slot, int pair, int row) {
  const float sum = part.sums[(slot * Plan::pair + pair) * part.count + row];
  if (!Plan::has_bias) return sum;
  const long long first = part.chosen[slot] * Plan::pair * operands.n;
  return sum + ac::to_float(operands.bias[first + matrix_row(part.begin + row, pair, operands.n)]);
}

// A thread per row: no tile has more rows than a block has threads.
__device__ __forceinline__ void finish(const Operands& operands, const Part& part) {
  const int row = threadIdx.x;
  if (row >= part.count) return;
  const int output = part.begin + row;
  float acc[Plan::pair] = {};
  float aux[2] = {};
  if constexpr (Plan::summed) {
    for (int slot = 0; slot < part.slots; ++slot) {
      acc[0] = fmaf(ac::to_float(operands.scale[slot]), layer_of(operands, part, slot, 0, row), acc[0]);
    }
    if (Plan::has_aux0) aux[0] = ac::to_float(operands.aux0[output]);
    if (Plan::has_aux1) aux[1] = ac::to_float(operands.aux1[output]);
  } else {
#pragma unroll
    for (int pair = 0; pair < Plan::pair; ++pair) acc[pair] = layer_of(operands, part, 0, pair, row);
  }
  operands.out[static_cast<long long>(part.slot) * operands.n + output] = ac::from_float<Plan::Out>(Epilogue::apply(acc, aux));
}

template <class Vector> __device__ __forceinline__ void run_layer(const Operands& operands, const Part& part) {
  Layer<Vector> layer;
  layer.operands = operands;
  layer.part = part;
  layer.vectors = operands.k / Vector::size;
  layer.run(threadIdx.x / ac::warp_size, threadIdx.x % ac::warp_size);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
experts_kernel(const Plan::T* x, const Plan::T* weight, const long long* experts, const Plan::T* bias, const Plan::Scale* scale,
               const Plan::T* aux0, const Plan::T* aux1, Plan::Out* out, const Plan::Logit* logits, const Plan::RouterBias* router_bias,
               Plan::Score* scores, long long* choice, int n, int k, int slots, int matrices, float eps, float factor) {
  __shared__ long long chosen[most_slots];
  AC_DYNAMIC_SHARED(float, sums);
  if constexpr (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();

  const Operands operands{x, weight, experts, bias, scale, aux0, aux1, out, n, k};
  const int begin = blockIdx.x * Plan::tile;
  const Part part{begin, min(Plan::tile, n - begin), static_cast<int>(blockIdx.y), Plan::summed ? slots : 1, chosen, sums};
  const Router<Plan> router{logits, router_bias, scores, choice, matrices, eps, factor};
  share_experts(router, experts, slots, part.slot, part.slots, chosen);
  __syncthreads();
  if (Plan::vectors && ac::is_aligned16(x) && ac::is_aligned16(weight)) {
    run_layer<ac::Vec16<Element>>(operands, part);
  } else {
    run_layer<ac::Vec1<Element>>(operands, part);
  }
  __syncthreads();
  finish(operands, part);
}
