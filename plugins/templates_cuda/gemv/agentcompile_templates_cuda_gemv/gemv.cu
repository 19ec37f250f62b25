// Matrix-vector product for one token, weights through registers (the "direct" schedules). What is
// computed, and the operands' layouts: see gemv_common.cuh.
//
// A row belongs to a group of Plan::warps_per_row
// warps: 1 for short rows, the whole block for long ones (the dual path of adaptive K), partial sums combined by warp
// shuffles and then through shared memory. A group computes Plan::rows output rows at a time. Every lane keeps
// rows * pair * unroll 16-byte loads in flight and refills a register as soon as it is consumed; the first batch is issued
// before the grid dependency wait, so weights stream while the previous kernel of the chain still runs.
//
// Wins where rows or grids are small, on every architecture; for long streams on sm_90 and later see gemv_ring.cu.
#include "gemv_common.cuh"

namespace {

constexpr int groups = Plan::warps / Plan::warps_per_row;

struct Shared {
  Element* row;     // the staged x
  float* scratch;   // Plan::warps floats
  float* partials;  // 2 * Plan::warps * streams floats
};

template <class Vector> __device__ __forceinline__ Vector stream(const Element* address) {
  if constexpr (Vector::size > 1) {
    return Vector{ac::load_stream16(address)};
  } else {
    return Vector::load(address);
  }
}

template <class Vector> struct Gemv {
  // Vectors of a row that a group covers in one step.
  static constexpr int step = Plan::warps_per_row * Plan::unroll * ac::warp_size;

  Operands operands;
  int vectors;     // per row
  int row_end;     // of this block
  Vector weights[streams][Plan::unroll];

  __device__ __forceinline__ Vector fetch(int row, int vector, int number) const {
    const int output = row + number / Plan::pair;
    if (output >= row_end || vector >= vectors) return Vector::zero();
    const long long weight_row = output + static_cast<long long>(number % Plan::pair) * operands.n;
    return stream<Vector>(operands.weight + weight_row * operands.k + vector * Vector::size);
  }

  __device__ __forceinline__ void fetch_all(int row, int first) {
#pragma unroll
    for (int number = 0; number < streams; ++number) {
#pragma unroll
      for (int u = 0; u < Plan::unroll; ++u) weights[number][u] = fetch(row, first + u * ac::warp_size, number);
    }
  }

  // Consumes the batch held in registers against the staged row and refills each register with the next batch's vector.
  __device__ __forceinline__ void multiply(const Element* staged, int first, int next_row, int next_first,
                                           float (&sums)[streams]) {
#pragma unroll
    for (int u = 0; u < Plan::unroll; ++u) {
      float x[Vector::size];
      Vector::load(staged + (first + u * ac::warp_size) * Vector::size).unpack(x);
#pragma unroll
      for (int number = 0; number < streams; ++number) {
        float w[Vector::size];
        weights[number][u].unpack(w);
        weights[number][u] = fetch(next_row, next_first + u * ac::warp_size, number);
#pragma unroll
        for (int lane = 0; lane < Vector::size; ++lane) sums[number] = fmaf(w[lane], x[lane], sums[number]);
      }
    }
  }

  __device__ __forceinline__ void finish(int row, int lane, const float (&sums)[streams], const Aux& aux) const {
    const int output = row + lane;
    if (lane >= Plan::rows || output >= row_end) return;
    operands.out[output] = result_of(sums, aux, lane);
  }

  __device__ __forceinline__ void run(Shared shared, int row_begin) {
    const int lane = threadIdx.x % ac::warp_size;
    const int warp = threadIdx.x / ac::warp_size;
    const int group = warp / Plan::warps_per_row;
    const int member = warp % Plan::warps_per_row;
    const int first = member * Plan::unroll * ac::warp_size + lane;
    const int tiles = (row_end - row_begin + groups * Plan::rows - 1) / (groups * Plan::rows);
    const int padded = (vectors + step - 1) / step * step;

    int row = row_begin + group * Plan::rows;
    fetch_all(row, first);
    constexpr int held = Plan::held_vectors;
    ac::RowStage<Plan::norm, Plan::threads, held, Element, Vector, Plan::X> stage;
    stage.prefetch(operands.norm_weight, operands.norm_bias, vectors, threadIdx.x);
    const auto before = before_norm<Vector, Plan::threads>(operands, vectors, threadIdx.x);

    ac::grid_dependency_wait();
    Aux aux = load_aux(operands, row, row_end, lane);
    stage.run(operands.x, operands.norm_weight, operands.norm_bias, shared.row, vectors, padded, operands.norm_eps,
              shared.scratch, threadIdx.x, ac::BlockBarrier{}, before);
    write_normed<Vector, Plan::threads>(operands, shared.row, vectors, threadIdx.x);

    for (int tile = 0; tile < tiles; ++tile) {
      const int next_tile_row = row + groups * Plan::rows;
      float sums[streams] = {};
      for (int start = 0; start < padded; start += step) {
        const bool last = start + step >= padded;
        multiply(shared.row, first + start, last ? next_tile_row : row, last ? first : first + start + step, sums);
      }
      sum_lanes(sums);
      if constexpr (Plan::warps_per_row > 1) combine(shared.partials, tile % 2, group, member, lane, sums);
      if (member == 0) finish(row, lane, sums, aux);
      row = next_tile_row;
      aux = load_aux(operands, row, row_end, lane);
    }
  }

  // Adds the partial sums of a group's warps in a fixed order. Two buffers, so that one barrier per tile is enough: a buffer
  // is written again only after the barrier of the tile between.
  __device__ __forceinline__ void combine(float* partials, int buffer, int group, int member, int lane,
                                          float (&sums)[streams]) const {
    float* mine = partials + (buffer * Plan::warps + group * Plan::warps_per_row) * streams;
    if (lane == 0) {
#pragma unroll
      for (int number = 0; number < streams; ++number) mine[member * streams + number] = sums[number];
    }
    __syncthreads();
    if (member != 0) return;
#pragma unroll
    for (int number = 0; number < streams; ++number) {
      sums[number] = 0.0f;
#pragma unroll
      for (int other = 0; other < Plan::warps_per_row; ++other) sums[number] += mine[other * streams + number];
    }
  }
};

// Whether every row starts at a multiple of 16 bytes. (A null pointer counts as aligned.)
__device__ __forceinline__ bool allows_vectors(const Operands& operands) {
  return operands.k % ac::Vec16<Element>::size == 0 && ac::is_aligned16(operands.x) &&
         ac::is_aligned16(operands.weight) && ac::is_aligned16(operands.norm_weight) &&
         ac::is_aligned16(operands.norm_bias) && ac::is_aligned16(operands.norm_out) && ac::is_aligned16(operands.residual) &&
         ac::is_aligned16(operands.post_weight) && ac::is_aligned16(operands.residual_out);
}

template <class Vector> __device__ __forceinline__ void run_gemv(const Operands& operands, Shared shared) {
  const RowRange range = rows_of_block(operands.n, operands.rows_each);
  Gemv<Vector> gemv;
  gemv.operands = operands;
  gemv.vectors = operands.k / Vector::size;
  gemv.row_end = range.begin + range.count;  // here: range.end would be computed for both vector widths at once
  gemv.run(shared, range.begin);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm)
gemv_kernel(const Plan::X* x, const Plan::T* weight, const Plan::T* norm_weight, const Plan::T* norm_bias,
            const Plan::A0* aux0, const Plan::A1* aux1, Plan::Out* out, Plan::T* norm_out, const Plan::T* residual,
            const Plan::T* post_weight, Plan::T* residual_out, int n, int rows_each, int k, float norm_eps, float post_eps) {
  __shared__ float scratch[Plan::warps];
  __shared__ float partials[2 * Plan::warps * streams];
  AC_DYNAMIC_SHARED(Element, row);
  if constexpr (Plan::pdl) ac::launch_dependents();

  const Operands operands{x, weight, norm_weight, norm_bias, aux0, aux1, out, norm_out, residual, post_weight,
                          residual_out, post_eps, n, rows_each, Plan::k > 0 ? Plan::k : k, norm_eps};
  const Shared shared{row, scratch, partials};
  if constexpr (Plan::vectors) {
    if (allows_vectors(operands)) {
      run_gemv<ac::Vec16<Element>>(operands, shared);
      return;
    }
  }
  run_gemv<ac::Vec1<Element>>(operands, shared);
}
