// Matrix-vector product for one token, weights through a ring of bulk copies in shared memory (the "tensor" schedules, sm_90+, fp16 and bf16;
// gemv_stream.cuh), multiplied by tensor cores: m16n8k16, whose eight columns are rows of the matrix and two of whose rows are x.
//
// The warps of a block share the columns of a slot. A lane takes 16 bytes of a row and of x at a time, words 0 to 3, for two instructions:
// which columns of the matrix stand where in an instruction matters to nobody, as long as they are those of x. Words 0 and 1 of the matrix
// meet words 0 and 1 of x in the upper eight rows of the first one, words 2 and 3 in the lower eight of the second one, so that all four
// words of x are one operand of both; what stands in the other rows is not read.
// Rows beside each other lie at multiples of 128 bytes, so lanes of odd rows take the second half of 64 columns while those of even rows
// take the first, and the other way round: eight lanes then read from all banks. So do lanes of x, whose row 0 is for even rows of the
// matrix and whose row 1 for odd ones. Warps' sums meet in shared memory, and one of them finishes the rows of a group.
//
// A slot costs a quarter of the instructions that FMA takes, which are a third of what can be issued while its bytes arrive: less stands
// between the last bytes and the last row, and before the first slot is free again. Within 3 % of FMA on an H200, on either side of it.
#include "gemv_stream.cuh"

namespace {

constexpr int half_columns = 32, block_columns = 2 * half_columns;
constexpr int column_blocks = Plan::columns / block_columns;
constexpr int turns = (column_blocks + Plan::warps - 1) / Plan::warps;
constexpr int tile_rows = 8;  // of the matrix, in an instruction
constexpr int tiles = (stage_rows + tile_rows - 1) / tile_rows;  // of output rows; with pairs as many again
constexpr int sums_of_warp = Plan::pair * tiles * tile_rows;
static_assert(stage_rows <= ac::warp_size, "a lane finishes a row");
using Sums = float[2][2][Plan::pair * tiles][4];  // of each half and instruction its own, so that few wait for each other

__device__ __forceinline__ uint4 words_at(const Element* shared, bool exists) {
  return (exists ? Vector::load(shared) : Vector::zero()).bits;
}

// Adds this warp's columns of a slot to its sums. Of the group's rows the first `there` exist; all do where `AllRows`.
template <bool AllRows>
__device__ __forceinline__ void multiply(const Element* slot, const Element* x, int pitch, int width, int there, int warp, int lane,
                                         Sums& sums) {
  const int row = lane / 4, odd = row % 2, part = lane % 4 * Vector::size;
#pragma unroll
  for (int turn = 0; turn < turns; ++turn) {
    const int block = turn * Plan::warps + warp;
    if (column_blocks % Plan::warps != 0 && block >= column_blocks) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = block * block_columns + (half ^ odd) * half_columns + part;
      const bool inside = Plan::full_stages || column < width;
      const uint4 of_x = words_at(x + column, inside);
      const unsigned a[4] = {of_x.x, of_x.y, of_x.z, of_x.w};  // words 0, 2, 1 and 3, as they were staged
#pragma unroll
      for (int tile = 0; tile < Plan::pair * tiles; ++tile) {
        const int output = tile % tiles * tile_rows + row;
        const bool exists = AllRows && stage_rows % tile_rows == 0 ? true : output < there;
        const uint4 weights = words_at(slot + (tile / tiles * stage_rows + output) * pitch + column, inside && exists);
        const unsigned first[2] = {weights.x, weights.y}, second[2] = {weights.z, weights.w};
        ac::mma_m16n8k16<Element>(sums[half][0][tile], a, first);
        ac::mma_m16n8k16<Element>(sums[half][1][tile], a, second);
      }
    }
  }
}

// This warp's sums of all rows, for the one that finishes them. Halves are added as pairs, whichever came first: a row's sum does not
// depend on where it lies.
__device__ __forceinline__ void share(const Sums& sums, float* mine, int lane) {
  if (lane >= tile_rows) return;  // the lanes of rows 0, 1, 8 and 9
  const int odd = lane / 4;
#pragma unroll
  for (int tile = 0; tile < Plan::pair * tiles; ++tile) {
    float found[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float(&upper)[4] = sums[half][0][tile];
      const float(&lower)[4] = sums[half][1][tile];
      found[half] = odd == 0 ? upper[0] + lower[2] : upper[1] + lower[3];
    }
    mine[tile * tile_rows + lane % 4 * 2 + odd] = found[0] + found[1];
  }
}

// Output row `output` of the group, from the sums of all warps.
__device__ __forceinline__ Plan::Out result_at(const float (&sums)[Plan::warps][sums_of_warp], int output, const Aux& aux) {
  float found[Plan::pair];
#pragma unroll
  for (int of = 0; of < Plan::pair; ++of) {
    found[of] = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Plan::warps; ++warp) found[of] += sums[warp][of * tiles * tile_rows + output];
  }
  return finished(found, aux);
}

__device__ __forceinline__ void consume_all(const Operands& operands, Ring ring, RowRange range, const int* group_of, Element* staged,
                                            float* scratch, float (&shared)[2][Plan::warps][sums_of_warp], int warp, int lane) {
  Aux aux;
  const auto load = [&](int row, int end) { aux = aux_of(operands, row + lane, lane < stage_rows && row + lane < end); };
  stage_row<ac::MiddleExchanged>(operands, staged, scratch, [&] { load(first_row(range), last_row(operands, range)); });
  Ring::Position current;
  const int pitch = slot_pitch(operands.k);
  for_groups(operands, ring, current, range, group_of, [&](int row, int end, int number, auto waited) {
    const bool finishes = number % Plan::warps == warp;  // this warp finishes the group
    if (number > 0 && finishes) load(row, end);
    Sums sums = {};
    for (int column = 0; column < operands.k; column += Plan::columns) {
      if (!decltype(waited)::value || column > 0) ring.wait_full(current);
      const Element* slot = ring.slots + current.slot * slot_elements;
      if (row + stage_rows <= end) {
        multiply<true>(slot, staged + column, pitch, operands.k - column, stage_rows, warp, lane, sums);
      } else {
        multiply<false>(slot, staged + column, pitch, operands.k - column, end - row, warp, lane, sums);
      }
      __syncwarp();
      if (lane == 0) ring.release(current);
      current.advance();
    }
    // Two places in turns: a warp that is ahead writes to the other one.
    share(sums, shared[number % 2][warp], lane);
    ConsumerBarrier{}();
    if (finishes && lane < stage_rows && row + lane < end) operands.out[row + lane] = result_at(shared[number % 2], lane, aux);
  });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::resident)
gemv_kernel(const Plan::X* x, const Plan::T* weight, const Plan::T* norm_weight, const Plan::T* norm_bias,
            const Plan::A0* aux0, const Plan::A1* aux1, Plan::Out* out, Plan::T* norm_out, const Plan::T* residual,
            const Plan::T* post_weight, Plan::T* residual_out, unsigned int* tickets, int n, int rows_each, int k, float norm_eps, float post_eps) {
  __shared__ float scratch[Plan::warps];
  __shared__ float sums[2][Plan::warps][sums_of_warp];
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
    consume_all(operands, ring, range, group_of, staged, scratch, sums, warp, lane);
  });
}
