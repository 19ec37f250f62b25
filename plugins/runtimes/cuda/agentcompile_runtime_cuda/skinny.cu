// Products of at most eight rows with a matrix that is read once (a "skinny" product), by tensor cores; fp16 and bf16, sm_90 and later:
//
//   skinny_rows    out[t, i] = sum over j of x[t, j] weight[i, j] + bias[i]; a null bias is none
//   skinny_gated   out[t, i] = activation(sum over j of x[t, j] gate[i, j]) * sum over j of x[t, j] up[i, j]
//
// x [count, terms], matrices [columns, terms], bias [columns], out [count, columns], dense; rows begin at multiples of 16 bytes. fp32
// sums; those of gate and up are rounded as activation.cuh says, which knows the activations.
//
// Each block has columns of its own, as many as the others or one more, and takes `lines` lines of the matrices at a time through a ring
// of bulk copies (ring.cuh): slices of Plan::terms terms, with the same terms of x behind them. One warp fills the ring, matrices
// before the grid dependency wait and x behind it. The other warps share the terms of a slice: lines are the rows of mma.m16n8k16 and
// rows of x its columns, so that one instruction serves all eight. A thread takes 16 bytes of a line and of a row at a time, whose
// terms stand in the same order in both, which is all that a sum asks for. Then the warps' sums are added in shared memory.
// Wins for 2 to 8 rows: the libraries read the matrix as slowly as they do for 64, and start only when the rows are there.
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>
#include <agentcompile/ring.cuh>

#include "plan.cuh"

namespace {

using T = Plan::T;
constexpr int most = 8;  // rows of x
constexpr int warps = Plan::threads / ac::warp_size - 1;
constexpr int multipliers = warps * ac::warp_size;
constexpr int chunk = 32;  // terms that a warp takes of a line at a time
constexpr int chunks = Plan::terms / (warps * chunk);
constexpr int pitch = Plan::terms + 32;  // of a line in a slot: lines next to each other lie in other banks
constexpr int lines = Plan::lines;
constexpr int tiles = lines / 16;
constexpr int sums_pitch = lines + 4;
constexpr int sums_of_warp = most * sums_pitch;
static_assert(chunks * warps * chunk == Plan::terms && tiles * 16 == lines, "whole chunks and tiles");
using Ring = ac::Ring<T, Plan::stages>;

// The operands of a product with one matrix, and of one with two.
struct Plain {
  const T* weight;
  const T* bias;
  static constexpr int outputs = lines;  // columns that the lines of a slot are

  static __device__ __forceinline__ int output_of(int line) { return line; }
  __device__ __forceinline__ const T* line_of(int line, int column, int terms) const {
    return weight + static_cast<long long>(column) * terms;
  }
  __device__ __forceinline__ float result(const float* sums, int output, int column) const {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < warps; ++warp) total += sums[warp * sums_of_warp + output];
    return bias != nullptr ? total + ac::to_float(bias[column]) : total;
  }
};

// Eight lines of gate and the same ones of up make the rows of one multiplication.
struct Gated {
  const T* gate;
  const T* up;
  int activation;
  static constexpr int outputs = lines / 2;

  static __device__ __forceinline__ int output_of(int line) { return line / 16 * 8 + line % 8; }
  __device__ __forceinline__ const T* line_of(int line, int column, int terms) const {
    return (line % 16 < 8 ? gate : up) + static_cast<long long>(column) * terms;
  }
  __device__ __forceinline__ float result(const float* sums, int output, int) const {
    const int line = output / 8 * 16 + output % 8;
    float left = 0.0f, right = 0.0f;
#pragma unroll
    for (int warp = 0; warp < warps; ++warp) {
      left += sums[warp * sums_of_warp + line];
      right += sums[warp * sums_of_warp + line + 8];
    }
    return ac::gated<T>(activation, left, right);
  }
};

// The columns of this block.
struct Range {
  int begin, end;

  static __device__ __forceinline__ Range of_block(int columns) {
    const int each = columns / static_cast<int>(gridDim.x), longer = columns % static_cast<int>(gridDim.x);
    const int block = static_cast<int>(blockIdx.x), begin = block * each + min(block, longer);
    return {begin, begin + each + (block < longer ? 1 : 0)};
  }
};

__device__ __forceinline__ uint4 words_at(const T* shared, bool exists) {
  return exists ? *reinterpret_cast<const uint4*>(shared) : make_uint4(0, 0, 0, 0);
}

template <class Weights> struct Block {
  const T* x;
  Weights weights;
  T* out;
  int count, columns, terms;
  Range range;
  Ring ring;

  static constexpr int outputs = Weights::outputs;
  __device__ __forceinline__ int slices() const { return (terms + Plan::terms - 1) / Plan::terms; }
  __device__ __forceinline__ int groups() const { return (range.end - range.begin + outputs - 1) / outputs; }
  __device__ __forceinline__ T* slot(int number) const { return ring.slots + number * (lines + count) * pitch; }

  // One warp: has the lines of slice `number` of this block copied to its slot.
  __device__ __forceinline__ void fetch_lines(int number, int place, int lane) const {
    const int first = range.begin + number / slices() * outputs, from = number % slices() * Plan::terms;
    const int there = min(outputs, range.end - first), width = min(Plan::terms, terms - from);
    const int copied = there * (lines / outputs) + count;
    if (lane == 0) ac::mbarrier_arrive_expect_bytes(ring.full + place, copied * width * sizeof(T));
    __syncwarp();
#pragma unroll 1
    for (int line = lane; line < lines; line += ac::warp_size) {
      const int output = Weights::output_of(line);
      if (output >= there) continue;
      ac::bulk_copy_to_shared_evict_first(slot(place) + line * pitch, weights.line_of(line, first + output, terms) + from,
                                          width * sizeof(T), ring.full + place);
    }
  }

  // The same terms of the rows of x.
  __device__ __forceinline__ void fetch_rows(int number, int place, int lane) const {
    const int from = number % slices() * Plan::terms, width = min(Plan::terms, terms - from);
    if (lane >= count) return;
    ac::bulk_copy_to_shared(slot(place) + (lines + lane) * pitch, x + static_cast<long long>(lane) * terms + from, width * sizeof(T),
                            ring.full + place);
  }

  __device__ __forceinline__ void produce(int lane) const {
    const int total = groups() * slices(), early = min(total, Plan::stages);
    typename Ring::Position next, lagging;
    for (int number = 0; number < total; ++number) {
      ring.template acquire<Plan::stages>(next, lagging, number);
      fetch_lines(number, next.slot, lane);
      if (number == early - 1) {
        ac::grid_dependency_wait();
        for (int before = 0; before < early; ++before) fetch_rows(before, before, lane);
      } else if (number >= early) {
        fetch_rows(number, next.slot, lane);
      }
      next.advance();
    }
  }

  // Adds this warp's terms of a slot to its sums; of the lines the first `there` of each matrix exist.
  __device__ __forceinline__ void multiply(const T* lines_of_slot, int width, int there, int warp, int lane, float (&sums)[tiles][4]) const {
    const T* const row = lines_of_slot + (lines + min(lane / 4, count - 1)) * pitch;
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      const int at = (c * warps + warp) * chunk + lane % 4 * 8;
      const bool inside = at < width;
      const uint4 of_x = words_at(row + at, inside);
      const unsigned first[2] = {of_x.x, of_x.y}, second[2] = {of_x.z, of_x.w};
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        const int line = tile * 16 + lane / 4;
        const uint4 low = words_at(lines_of_slot + line * pitch + at, inside && Weights::output_of(line) < there);
        const uint4 high = words_at(lines_of_slot + (line + 8) * pitch + at, inside && Weights::output_of(line + 8) < there);
        const unsigned left[4] = {low.x, high.x, low.y, high.y}, right[4] = {low.z, high.z, low.w, high.w};
        ac::mma_m16n8k16<T>(sums[tile], left, first);
        ac::mma_m16n8k16<T>(sums[tile], right, second);
      }
    }
  }

  __device__ __forceinline__ void consume(float* scratch, int warp, int lane) const {
    ac::grid_dependency_wait();
    typename Ring::Position current;
    for (int group = 0; group < groups(); ++group) {
      const int first = range.begin + group * outputs, there = min(outputs, range.end - first);
      float sums[tiles][4] = {};
      for (int from = 0; from < terms; from += Plan::terms) {
        ring.wait_full(current);
        multiply(slot(current.slot), terms - from, there, warp, lane, sums);
        __syncwarp();
        if (lane == 0) ring.release(current);
        current.advance();
      }
      // Two places in turns: a warp that is ahead writes to the other one.
      float* const added = scratch + group % 2 * warps * sums_of_warp;
      float* const mine = added + warp * sums_of_warp + lane % 4 * 2 * sums_pitch + lane / 4;
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) mine[i % 2 * sums_pitch + tile * 16 + i / 2 * 8] = sums[tile][i];
      }
      ac::named_barrier_sync(1, multipliers);
      for (int item = threadIdx.x; item < count * outputs; item += multipliers) {
        const int row = item / outputs, output = item % outputs;
        if (output >= there) continue;
        const float found = weights.result(added + row * sums_pitch, output, first + output);
        out[static_cast<long long>(row) * columns + first + output] = ac::from_float<T>(found);
      }
    }
  }
};

// What a block keeps beside its ring.
struct Kept {
  float sums[2 * warps * sums_of_warp];
  ac::Mbarrier full[Plan::stages];
  ac::Mbarrier empty[Plan::stages];
};

template <class Weights>
__device__ __forceinline__ void run(const T* x, Weights weights, T* out, int count, int columns, int terms, Kept& kept) {
  AC_DYNAMIC_SHARED(T, slots);
  ac::launch_dependents();
  const Block<Weights> block{x, weights, out, count, columns, terms, Range::of_block(columns), Ring{slots, kept.full, kept.empty}};
  const int warp = threadIdx.x / ac::warp_size, lane = threadIdx.x % ac::warp_size;
  if (threadIdx.x == 0) block.ring.init(warps);
  __syncthreads();
  if (warp < warps) {
    block.consume(kept.sums, warp, lane);
  } else {
    block.produce(lane);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads, 1)
skinny_rows(const Plan::T* x, const Plan::T* weight, const Plan::T* bias, Plan::T* out, int count, int columns, int terms) {
  __shared__ Kept kept;
  run(x, Plain{weight, bias}, out, count, columns, terms, kept);
}

extern "C" __global__ void __launch_bounds__(Plan::threads, 1)
skinny_gated(const Plan::T* x, const Plan::T* gate, const Plan::T* up, Plan::T* out, int count, int columns, int terms, int activation) {
  __shared__ Kept kept;
  run(x, Gated{gate, up, activation}, out, count, columns, terms, kept);
}
