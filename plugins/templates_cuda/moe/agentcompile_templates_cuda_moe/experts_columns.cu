// Linear layers of the chosen experts, whose matrices lie column by column: weight [experts, k, pair * n]. What is computed, and all
// other operands: see experts.cu; element c of a row of the matrix belongs to output c, or to part c / n of output c % n, or, if
// Plan::interleaved, to part c % 2 of output c / 2.
//
// Grid (tiles of Plan::tile elements of a row, of either half of a pair, Plan::split blocks for each; slots, 1 if summed). Plan::lanes
// neighbouring lanes read that part of a row, 16 bytes each, and every lane keeps the sums of its own elements; groups of lanes take rows
// by turns, of all slots of a sum one after the other, each weighed as it is read. Plan::unroll rows are loaded while as many are added
// up. Sums over groups meet by shuffles and then through shared memory. The blocks of a tile are a cluster that deals the rows out; the
// first one gets the sums of all, and adds them up in their order. They win where whole tiles are too few, or too few more than fit at
// once, to keep every SM busy: a sum over slots.
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>
#include <agentcompile/row.cuh>

#include "plan.cuh"
#include "chosen.cuh"

namespace {

using Element = Plan::T;
constexpr int most_slots = 32;
constexpr int streams = Plan::pair == 2 && !Plan::interleaved ? 2 : 1;  // parts of a row that a lane reads
constexpr int groups = Plan::threads / Plan::lanes;
constexpr int warps = Plan::threads / ac::warp_size;

// Absent operands are null.
struct Operands {
  const Element* x;
  const Element* weight;
  const Element* bias;
  const Plan::Scale* scale;
  const Element* aux0;
  const Element* aux1;
  Plan::Out* out;
  int n;
  int k;
  int width;  // of a row of the matrix
};

// What a block computes: elements [begin, begin + count) of each stream, of the slots [slot, slot + slots), over
// rows [row, row + rows).
struct Part {
  int begin;
  int count;
  int slot;
  int slots;
  int row;
  int rows;
  const long long* chosen;  // of these slots
  float* sums;              // [warps, streams, tile]
  float* blocks;            // [split, streams, tile], if it is split: in the first block, what each block has
};

// A row of the part, in one of its slots; behind the last one there is no slot any more.
struct Place {
  int slot;
  int row;

  __device__ __forceinline__ void advance(const Part& part) {
    for (row += groups; row >= part.row + part.rows && slot < part.slots; ++slot) row -= part.rows;
  }
};

// Rows in flight: their weights, and what these are multiplied with.
template <class Vector> struct Batch {
  Vector weights[Plan::unroll][streams];
  float given[Plan::unroll];
};

template <class Vector> __device__ __forceinline__ Vector load_row(const Element* address) {
  if constexpr (Vector::size > 1) {
    return Vector{ac::load_stream16(address)};
  } else {
    return Vector::load(address);
  }
}

// Elements [first, first + Vector::size) of the part, in both streams, of the next rows that are this group's turn.
template <class Vector>
__device__ __forceinline__ void load(const Operands& operands, const Part& part, Place& place, int first, Batch<Vector>& batch) {
#pragma unroll
  for (int u = 0; u < Plan::unroll; ++u) {
    const bool exists = place.slot < part.slots;
    const int slot = exists ? place.slot : 0;
    const long long row = part.chosen[slot] * operands.k + place.row;
    const long long of_x = (Plan::shared ? 0 : static_cast<long long>(part.slot + slot) * operands.k) + place.row;
    batch.given[u] = exists ? ac::to_float(operands.x[of_x]) : 0.0f;
    if constexpr (Plan::summed) batch.given[u] *= ac::to_float(operands.scale[slot]);
#pragma unroll
    for (int part_of = 0; part_of < streams; ++part_of) {
      const Element* address = operands.weight + row * operands.width + part.begin + first + part_of * operands.n;
      batch.weights[u][part_of] = exists && first < part.count ? load_row<Vector>(address) : Vector::zero();
    }
    place.advance(part);
  }
}

template <class Vector> __device__ __forceinline__ void add(const Batch<Vector>& batch, float (&sums)[streams][Vector::size]) {
#pragma unroll
  for (int u = 0; u < Plan::unroll; ++u) {
#pragma unroll
    for (int part_of = 0; part_of < streams; ++part_of) {
      float w[Vector::size];
      batch.weights[u][part_of].unpack(w);
#pragma unroll
      for (int element = 0; element < Vector::size; ++element) {
        sums[part_of][element] = fmaf(w[element], batch.given[u], sums[part_of][element]);
      }
    }
  }
}

// The sums of a group over its rows; the next ones are loaded while some are added up.
template <class Vector>
__device__ __forceinline__ void add_rows(const Operands& operands, const Part& part, int first, float (&sums)[streams][Vector::size]) {
  const int rounds = (part.slots * part.rows + groups * Plan::unroll - 1) / (groups * Plan::unroll);
  Place place{0, part.row + static_cast<int>(threadIdx.x) / Plan::lanes - groups};
  place.advance(part);
  Batch<Vector> even, odd;
  load(operands, part, place, first, even);
  for (int round = 0; round < rounds; round += 2) {
    load(operands, part, place, first, odd);
    add(even, sums);
    load(operands, part, place, first, even);
    add(odd, sums);
  }
}

template <class Vector> __device__ __forceinline__ void run_layer(const Operands& operands, const Part& part) {
  const int warp = threadIdx.x / ac::warp_size;
  const int lane = threadIdx.x % ac::warp_size;
  for (int start = 0; start < Plan::tile; start += Plan::lanes * Vector::size) {
    const int first = start + lane % Plan::lanes * Vector::size;
    float sums[streams][Vector::size] = {};
    add_rows<Vector>(operands, part, first, sums);
#pragma unroll
    for (int part_of = 0; part_of < streams; ++part_of) {
#pragma unroll
      for (int element = 0; element < Vector::size; ++element) {
        float sum = sums[part_of][element];
#pragma unroll
        for (int offset = ac::warp_size / 2; offset >= Plan::lanes; offset /= 2) sum += __shfl_xor_sync(ac::full_warp, sum, offset);
        if (lane < Plan::lanes) part.sums[(warp * streams + part_of) * Plan::tile + first + element] = sum;
      }
    }
  }
}

// Sum of element `index` of a stream of the part over the warps.
__device__ __forceinline__ float over_warps(const Part& part, int stream, int index) {
  float sum = 0.0f;
  for (int warp = 0; warp < warps; ++warp) sum += part.sums[(warp * streams + stream) * Plan::tile + index];
  return sum;
}

// Every block sends its sums to the first one of its cluster, all of whose blocks have started.
__device__ __forceinline__ void send(const Part& part) {
  constexpr int cells = streams * Plan::tile;
  for (int cell = threadIdx.x; cell < cells; cell += Plan::threads) {
    const float sum = over_warps(part, cell / Plan::tile, cell % Plan::tile);
    ac::store_to_cluster(&part.blocks[ac::cluster_rank() * cells + cell], 0, sum);
  }
}

// Sum over all rows, with the biases.
__device__ __forceinline__ float layer_of(const Operands& operands, const Part& part, int stream, int index) {
  float sum = 0.0f;
  if constexpr (Plan::split > 1) {
    for (int block = 0; block < Plan::split; ++block) sum += part.blocks[(block * streams + stream) * Plan::tile + index];
  } else {
    sum = over_warps(part, stream, index);
  }
  if constexpr (Plan::has_bias) {
    for (int slot = 0; slot < part.slots; ++slot) {
      const float bias = ac::to_float(operands.bias[part.chosen[slot] * operands.width + part.begin + index + stream * operands.n]);
      sum = Plan::summed ? fmaf(ac::to_float(operands.scale[slot]), bias, sum) : sum + bias;
    }
  }
  return sum;
}

// A thread per output: no tile has more of them than a block has threads.
__device__ __forceinline__ void finish(const Operands& operands, const Part& part) {
  constexpr int each = Plan::interleaved ? 2 : 1;
  const int index = threadIdx.x * each;
  if (index >= part.count) return;
  const int output = (part.begin + index) / each;
  float acc[Plan::pair] = {};
  float aux[2] = {};
#pragma unroll
  for (int pair = 0; pair < Plan::pair; ++pair) {
    acc[pair] = layer_of(operands, part, Plan::interleaved ? 0 : pair, Plan::interleaved ? index + pair : index);
  }
  if (Plan::has_aux0) aux[0] = ac::to_float(operands.aux0[output]);
  if (Plan::has_aux1) aux[1] = ac::to_float(operands.aux1[output]);
  operands.out[static_cast<long long>(part.slot) * operands.n + output] = ac::from_float<Plan::Out>(Epilogue::apply(acc, aux));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
experts_kernel(const Plan::T* x, const Plan::T* weight, const long long* experts, const Plan::T* bias, const Plan::Scale* scale,
               const Plan::T* aux0, const Plan::T* aux1, Plan::Out* out, const Plan::Logit* logits, const Plan::RouterBias* router_bias,
               Plan::Score* scores, long long* choice, int n, int k, int slots, int matrices, float eps, float factor) {
  __shared__ long long chosen[most_slots];
  AC_DYNAMIC_SHARED(float, sums);
  static_assert(Plan::tile <= Plan::threads * (Plan::interleaved ? 2 : 1), "a thread finishes one output at most");
  if constexpr (Plan::pdl) ac::launch_dependents();
  if constexpr (Plan::split > 1) ac::cluster_arrive_relaxed();
  ac::grid_dependency_wait();

  const Operands operands{x, weight, bias, scale, aux0, aux1, out, n, k, Plan::pair * n};
  const int begin = blockIdx.x / Plan::split * Plan::tile;
  const int end = Plan::interleaved ? 2 * n : n;
  const int span = (k + Plan::split - 1) / Plan::split;
  const int row = blockIdx.x % Plan::split * span;
  const int computed = Plan::summed ? slots : 1;
  const Part part{begin, min(Plan::tile, end - begin), static_cast<int>(blockIdx.y), computed, row, min(span, k - row), chosen, sums,
                  sums + warps * streams * Plan::tile};
  const Router<Plan> router{logits, router_bias, scores, choice, matrices, eps, factor};
  share_experts(router, experts, slots, part.slot, part.slots, chosen);
  __syncthreads();
  if (Plan::vectors && ac::is_aligned16(weight)) {
    run_layer<ac::Vec16<Element>>(operands, part);
  } else {
    run_layer<ac::Vec1<Element>>(operands, part);
  }
  __syncthreads();
  if constexpr (Plan::split > 1) {
    ac::cluster_wait();
    send(part);
    ac::cluster_arrive_release();
    ac::cluster_wait();
    if (ac::cluster_rank() != 0) return;
  }
  finish(operands, part);
}
