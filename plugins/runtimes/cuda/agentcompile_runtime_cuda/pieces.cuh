// fp32 numbers as sums of three bf16 numbers, and lines of those in shared memory, for products by mma.m16n8k16.
//
// A float is exactly the sum of its first eight bits, the next eight and the last eight. Of the nine products of two such sums the six
// largest are added up; the others are together below 2^-23 of the product. What was bf16 before has one piece, fp16 two.
#pragma once
#include <agentcompile/ptx.cuh>

namespace {

using Piece = unsigned short;  // the bits of a bf16 number
constexpr int most_pieces = 3;
constexpr int step = 16;  // terms of one mma, and lines of its left side

__device__ __forceinline__ float first_bits(float x) { return __uint_as_float(__float_as_uint(x) & 0xffff0000u); }

// Piece by piece of two neighbours, a in the lower half. Pieces of an infinity are NaN.
__device__ __forceinline__ void split_up(float a, float b, unsigned (&pieces)[most_pieces]) {
#pragma unroll
  for (int p = 0; p < most_pieces; ++p) {
    pieces[p] = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
    a -= first_bits(a);
    b -= first_bits(b);
  }
}

__device__ __forceinline__ float2 unpacked(unsigned pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Where the eight neighbours `unit` of a line of Width numbers lie: so permuted that those of eight lines meet all banks.
template <int Width> __device__ __forceinline__ int place(int line, int unit) {
  constexpr int units = Width / 8, shift = units >= 8 ? 0 : units == 4 ? 1 : 2, mask = units >= 8 ? 7 : units - 1;
  static_assert(units == 2 || units == 4 || units % 8 == 0, "permuted units stay in their line");
  return (line * units + (unit ^ ((line >> shift) & mask))) * 8;
}

// Sixteen lines by sixteen numbers: {lines 0-7, numbers 0-7}, {8-15, 0-7}, {0-7, 8-15}, {8-15, 8-15}. A lane has numbers 2 (lane % 4) and
// the next one of line lane / 4: the left side of a product whose terms are the numbers.
template <int Width> __device__ __forceinline__ void read_lines(unsigned (&parts)[4], const Piece* lines, int line, int number) {
  const int lane = threadIdx.x % 32;
  ac::ldmatrix_x4(parts, lines + place<Width>(line + lane % 16, number / 8 + lane / 16));
}

// The same parts of what lies the other way: a lane has number lane / 4 of lines 2 (lane % 4) and the next one, and the parts are
// {numbers 0-7, lines 0-7}, {8-15, 0-7}, {0-7, 8-15}, {8-15, 8-15}.
template <int Width> __device__ __forceinline__ void read_turned(unsigned (&parts)[4], const Piece* lines, int line, int number) {
  const int lane = threadIdx.x % 32;
  ac::ldmatrix_x4_transposed(parts, lines + place<Width>(line + lane % 8 + lane / 16 * 8, number / 8 + lane / 8 % 2));
}

// Two neighbouring products: left [16, 16] by the eight lines that come first in `right` [16, 16], and by the others.
__device__ __forceinline__ void multiply_pair(float (&first)[4], float (&second)[4], const unsigned (&left)[4], const unsigned (&right)[4]) {
  const unsigned low[2] = {right[0], right[2]}, high[2] = {right[1], right[3]};
  ac::mma_m16n8k16_bf16(first, left, low);
  ac::mma_m16n8k16_bf16(second, left, high);
}

}  // namespace
