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

// Piece by piece of two neighbours, a in the lower half. Pieces of an infinity are NaN, and zero times them too.
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

// How the eight neighbours `unit` of a line of Width numbers lie: so permuted that those of eight lines meet all banks. Lines that are
// multiples of eight apart are permuted alike, and what is even in `number` may be exclusively or-ed to a place.
template <int Width> __device__ __forceinline__ int place(int line, int unit) {
  constexpr int units = Width / 8, shift = units >= 8 ? 0 : units == 4 ? 1 : 2, mask = units >= 8 ? 7 : units - 1;
  static_assert(units == 2 || units == 4 || units == 8 || units % 16 == 0, "permuted units stay in their line");
  return (line * units + (unit ^ ((line >> shift) & mask))) * 8;
}

// Places from which a lane reads sixteen lines by sixteen numbers, as four parts of eight by eight: {lines 0-7, numbers 0-7}, {8-15, 0-7},
// {0-7, 8-15}, {8-15, 8-15}; or the second one and the third one exchanged. Where `number` is a multiple of 16, (place ^ number) is that
// of the numbers from there on.
template <int Width> __device__ __forceinline__ int lines_first() {
  const int lane = threadIdx.x % 32;
  return place<Width>(lane % 16, lane / 16);
}
template <int Width> __device__ __forceinline__ int numbers_first() {
  const int lane = threadIdx.x % 32;
  return place<Width>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
// A left side whose terms are the numbers is read lines first by ldmatrix_x4, a right side numbers first, so that its halves are whole; by
// ldmatrix_x4_transposed, for terms that are the lines, it is the other way.

// Two neighbouring products: left [16, 16] by the first eight columns of `right`, and by the others.
__device__ __forceinline__ void multiply_pair(float (&first)[4], float (&second)[4], const unsigned (&left)[4],
                                              const unsigned (&right)[4]) {
  const unsigned low[2] = {right[0], right[1]}, high[2] = {right[2], right[3]};
  ac::mma_m16n8k16_bf16(first, left, low);
  ac::mma_m16n8k16_bf16(second, left, high);
}

}  // namespace
