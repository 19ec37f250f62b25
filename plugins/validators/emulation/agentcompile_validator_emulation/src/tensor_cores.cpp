// mma.m16n8k16 and ldmatrix.x4, computed once per warp from all lanes' fragments. Fragment maps: PTX ISA, "mma.m16n8k16" and
// "ldmatrix". Products are accumulated in fp32 in ascending k: a model of the hardware's order, which NVIDIA does not specify.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "runtime.h"

namespace emu {

void whole_warp(Collective kind, const void* in, void* out, WarpFunction function);

struct MmaOperands {
  unsigned a[4], b[2];
  float c[4];
};

static float half_to_float(unsigned bits) {
  __half_raw raw;
  raw.x = static_cast<unsigned short>(bits);
  return __half2float(__half(raw));
}
static float bfloat16_to_float(unsigned bits) { return from_bits<float>(uint64_t(bits & 0xffff) << 16); }

// Eight columns of a row side by side, as vectors (g++ makes none of a loop that it unrolled before); each in ascending k.
__attribute__((optimize("O3"))) static void add_products(float (&sums)[16][8], const float (&a)[16][16], const float (&b)[16][8]) {
  for (unsigned row = 0; row < 16; ++row) {
    const float* const terms = a[row];
    float sum[8];
    std::memcpy(sum, sums[row], sizeof sum);
    for (unsigned k = 0; k < 16; ++k) {
#pragma GCC unroll 1
      for (unsigned column = 0; column < 8; ++column) sum[column] = __builtin_fmaf(terms[k], b[k][column], sum[column]);
    }
    std::memcpy(sums[row], sum, sizeof sum);
  }
}

template <float (*TO_FLOAT)(unsigned)>
static void mma_m16n8k16(void* const* inputs, void* const* outputs) {
  float a[16][16], b[16][8], sums[16][8];
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    const MmaOperands& operands = *static_cast<const MmaOperands*>(inputs[lane]);
    const unsigned group = lane / 4, member = lane % 4;
    for (unsigned i = 0; i < 8; ++i) {  // element i of the a fragment; elements 2j and 2j+1 share register j
      const unsigned row = group + ((i / 2) % 2) * 8, column = member * 2 + i % 2 + (i / 4) * 8;
      a[row][column] = TO_FLOAT(operands.a[i / 2] >> (16 * (i % 2)) & 0xffff);
    }
    for (unsigned i = 0; i < 4; ++i)
      b[member * 2 + i % 2 + (i / 2) * 8][group] = TO_FLOAT(operands.b[i / 2] >> (16 * (i % 2)) & 0xffff);
    for (unsigned i = 0; i < 4; ++i) sums[group + (i / 2) * 8][member * 2 + i % 2] = operands.c[i];
  }
  add_products(sums, a, b);
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    float* d = static_cast<float*>(outputs[lane]);
    for (unsigned i = 0; i < 4; ++i) d[i] = sums[lane / 4 + (i / 2) * 8][(lane % 4) * 2 + i % 2];
  }
}

static void run_mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], WarpFunction function) {
  MmaOperands operands;
  std::memcpy(operands.a, a, sizeof a);
  std::memcpy(operands.b, b, sizeof b);
  std::memcpy(operands.c, d, sizeof d);
  whole_warp(Collective::tensor_core, &operands, d, function);
}
void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  run_mma(d, a, b, mma_m16n8k16<half_to_float>);
}
void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  run_mma(d, a, b, mma_m16n8k16<bfloat16_to_float>);
}

template <bool TRANSPOSED>
static void gather_matrices(void* const* inputs, void* const* outputs) {
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
      char* fragment = static_cast<char*>(outputs[lane]) + matrix * 4;
      for (unsigned element = 0; element < 2; ++element) {
        const unsigned row = TRANSPOSED ? (lane % 4) * 2 + element : lane / 4;
        const unsigned column = TRANSPOSED ? lane / 4 : (lane % 4) * 2 + element;
        const char* source = static_cast<const char*>(*static_cast<const void* const*>(inputs[matrix * 8 + row]));
        std::memcpy(fragment + element * 2, source + column * 2, 2);
      }
    }
  }
}
void ldmatrix_x4(unsigned (&fragment)[4], const void* shared_row, bool transposed) {
  if (!static_region.contains(shared_row) && !dynamic_region.contains(shared_row))
    return fail("ldmatrix: the row address is not in shared memory");
  check_access(shared_row, 16, {Access::read, false, true}, __builtin_return_address(0));
  whole_warp(Collective::ldmatrix, &shared_row, fragment, transposed ? gather_matrices<true> : gather_matrices<false>);
}

}  // namespace emu
