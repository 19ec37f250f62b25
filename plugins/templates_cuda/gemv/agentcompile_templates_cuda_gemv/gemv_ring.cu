// Matrix-vector product for one token, weights through a ring of bulk copies in shared memory (the "ring" schedules, sm_90+; gemv_stream.cuh):
// every consumer warp owns the same rows of every slot, and multiplies by FMA.
//
// Wins for all long weight streams on sm_90 and later: two blocks per SM, 8 consumer warps (4 of paired rows), 64-80 KB in flight per SM.
#include "gemv_stream.cuh"

namespace {

constexpr int steps = Plan::columns / (ac::warp_size * Vector::size);  // vectors per lane and row of a stage

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
  const int mine = warp * Plan::rows;  // of a group
  Aux aux;
  stage_row<ac::Straight>(operands, staged, scratch, [&] { aux = load_aux(operands, first_row(range) + mine, last_row(operands, range), lane); });
  Ring::Position current;
  for_groups(operands, ring, current, range, group_of, [&](int group_row, int end, int number, auto waited) {
    const int row = group_row + mine;
    if (dealt && number > 0) aux = load_aux(operands, row, end, lane);
    float sums[streams] = {};
    consume_group<decltype(waited)::value>(operands, ring, current, staged, row, end, warp, lane, sums);
    sum_lanes(sums);
    if (lane < Plan::rows && row + lane < end) operands.out[row + lane] = result_of(sums, aux, lane);
    if constexpr (!dealt) aux = load_aux(operands, row + stage_rows, end, lane);
  });
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
  run_block(operands, ring, group_of, tickets, [&](RowRange range, int warp, int lane) {
    consume_all(operands, ring, range, group_of, staged, scratch, warp, lane);
  });
}
