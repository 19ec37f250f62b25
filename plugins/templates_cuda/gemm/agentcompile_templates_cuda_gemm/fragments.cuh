// A factor's slice of 16-bit elements in shared memory, and the fragments that mma.m16n8k16 takes of it.
//
// A slice is `spans` of `width` elements in chunks of eight; a span is a line of Plan::depth terms, or a term of `Lines` lines, as
// the factor lies in global memory. ldmatrix turns what lies the other way. The chunks of a span are permuted by its number, so
// that eight neighbouring spans meet all banks.
#pragma once
#include "gemm.cuh"

namespace {

template <int Lines, int Along> struct Layout {
  static constexpr bool by_terms = Along == along_terms;
  static constexpr int width = by_terms ? Plan::depth : Lines;
  static constexpr int spans = by_terms ? Lines : Plan::depth;
  static constexpr int chunks = width / 8;
  static constexpr int elements = Lines * Plan::depth;
  static_assert(chunks >= 2, "a span is at least two chunks");

  // Where a chunk lies: eight spans whose chunks share a row of banks are spread over it.
  static __device__ __forceinline__ int place(int span, int chunk) {
    constexpr int shift = chunks >= 8 ? 0 : chunks == 4 ? 1 : 2;
    constexpr int mask = chunks >= 8 ? 7 : chunks - 1;
    return (span * chunks + (chunk ^ ((span >> shift) & mask))) * 8;
  }
};

// The 8 x 8 matrix that this lane gives the address of, and its row in it.
struct Lane {
  int matrix;
  int row;
};

// Sixteen rows of a by sixteen terms from `term` on; rows from `row` on.
template <class Of, class E> __device__ __forceinline__ void read_a(const E* slice, int row, int term, Lane lane, unsigned (&fragment)[4]) {
  const int line = row + lane.matrix % 2 * 8;
  const int at = term + lane.matrix / 2 * 8;
  if constexpr (Of::by_terms) {
    ac::ldmatrix_x4(fragment, slice + Of::place(line + lane.row, at / 8));
  } else {
    ac::ldmatrix_x4_transposed(fragment, slice + Of::place(at + lane.row, line / 8));
  }
}

// Two fragments of eight columns by sixteen terms.
template <class Of, class E> __device__ __forceinline__ void read_b(const E* slice, int column, int term, Lane lane, unsigned (&fragments)[4]) {
  const int line = column + lane.matrix / 2 * 8;
  const int at = term + lane.matrix % 2 * 8;
  if constexpr (Of::by_terms) {
    ac::ldmatrix_x4(fragments, slice + Of::place(line + lane.row, at / 8));
  } else {
    ac::ldmatrix_x4_transposed(fragments, slice + Of::place(at + lane.row, line / 8));
  }
}

}  // namespace
