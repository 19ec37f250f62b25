// Warpgroup products (wgmma, sm_90a): four warps multiply 64 rows by Columns columns, both factors read from shared memory; and the copy
// engine that brings them there (cp.async.bulk.tensor). There is no emulation of these: a kernel that uses them runs on a device only.
//
// A factor's slice lies in panels of spans of 128 bytes (64 elements); the 16-byte chunks of a span are permuted by the span's number
// modulo 8, as the 128-byte swizzle of the hardware expects, and a panel begins at a multiple of 1,024 bytes. Where neighbours in memory
// are terms, a span is a line and one panel holds all lines; where they are lines, a span is a term, and a panel has 64 lines.
// The copy engine writes panels so by itself: a tile of 64 elements by any number of spans, swizzled by 128 bytes.
// Source of descriptors and layouts: the PTX ISA, "Asynchronous warpgroup level matrix multiply-accumulate instructions" and "Tensors".
#pragma once
#include <agentcompile/ptx.cuh>

namespace wg {

constexpr int span = 64;              // elements
constexpr int eight_spans = 8 * 128;  // bytes
constexpr int panel_spans = 64;       // of a panel whose spans are terms

// What the hardware is told of a slice: its address, how far apart panels and groups of eight spans are, the swizzle.
__device__ __forceinline__ unsigned long long descriptor(const void* shared) {
  constexpr unsigned long long panels = panel_spans * 128 / 16;
  constexpr unsigned long long groups = eight_spans / 16;
  constexpr unsigned long long swizzle_128_bytes = 1ull << 62;
  return (ac::shared_address(shared) & 0x3ffffu) >> 4 | panels << 16 | groups << 32 | swizzle_128_bytes;
}

// How far a descriptor moves from 16 terms to the next 16.
template <bool ByTerms> constexpr unsigned long long next_terms = (ByTerms ? 16 * 2 : 16 * 128) / 16;

__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending> __device__ __forceinline__ void wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory"); }

// Sums that were waited for; nothing that reads them moves in front of the wait.
template <int Count> __device__ __forceinline__ void settle(float (&sums)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Registers of each thread of the warpgroup from here on; those that it gives back are for the others to take.
template <int Count> __device__ __forceinline__ void shrink_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count)); }
template <int Count> __device__ __forceinline__ void grow_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count)); }

// What the copy engine needs to fetch tiles of a factor by itself: a CUtensorMap of four axes.
struct alignas(64) Tiles {
  unsigned char bytes[128];
};

__device__ __forceinline__ void prefetch(const Tiles& tiles) { asm volatile("prefetch.tensormap [%0];" ::"l"(&tiles) : "memory"); }

// One thread fetches the tile at these places of the four axes; the barrier, that of every block of the cluster in `blocks`, receives its
// bytes. Every such block gets it at the same place in its shared memory.
template <int Cluster>
__device__ __forceinline__ void fetch(void* shared, const Tiles& tiles, int along, int across, int inner, int outer, ac::Mbarrier* barrier,
                                      unsigned short blocks) {
  if constexpr (Cluster == 1) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
            ac::shared_address(shared)),
        "l"(&tiles), "r"(along), "r"(across), "r"(inner), "r"(outer), "r"(ac::shared_address(barrier))
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4, %5}], "
        "[%6], %7;" ::"r"(ac::shared_address(shared)),
        "l"(&tiles), "r"(along), "r"(across), "r"(inner), "r"(outer), "r"(ac::shared_address(barrier)), "h"(blocks)
        : "memory");
  }
}

// Arrives at the barrier of block `rank` of the cluster that lies where `barrier` lies in this block. What this thread stored before is
// not published by it: it says that products have read a place.
__device__ __forceinline__ void arrive_in_cluster(ac::Mbarrier* barrier, unsigned rank) {
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(ac::shared_address(barrier)), "r"(rank));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}

#define WG_SUMS4(s, i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define WG_SUMS16(s, i) WG_SUMS4(s, i), WG_SUMS4(s, i + 4), WG_SUMS4(s, i + 8), WG_SUMS4(s, i + 12)
#define WG_SUMS64(s, i) WG_SUMS16(s, i), WG_SUMS16(s, i + 16), WG_SUMS16(s, i + 32), WG_SUMS16(s, i + 48)

#define WG_SUMS128(s) WG_SUMS64(s, 0), WG_SUMS64(s, 64)
#define WG_NAMES0 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WG_NAMES64 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define WG_MULTIPLY(columns, type, names, ab, sums)                                                                                    \
  asm volatile("{ .reg .pred adds; setp.ne.b32 adds, 1, 0; wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type          \
               " {" names "}, " ab "; }"                                                                                               \
               : sums                                                                                                                  \
               : "l"(a), "l"(b), "n"(ByTermsA ? 0 : 1), "n"(ByTermsB ? 0 : 1))
#define WG_AB64 "%64, %65, adds, 1, 1, %66, %67"
#define WG_AB128 "%128, %129, adds, 1, 1, %130, %131"

template <class T> constexpr bool is_half = false;
template <> constexpr bool is_half<__half> = true;

// Adds 16 terms of 64 rows times Columns columns to `sums`, which nobody may touch until `wait`. Element 4 j + 2 h + e of a lane is that of
// row 16 (warp % 4) + 8 h + lane / 4 and column 8 j + 2 (lane % 4) + e.
template <class T, int Columns, bool ByTermsA, bool ByTermsB>
__device__ __forceinline__ void multiply(float (&sums)[Columns / 2], unsigned long long a, unsigned long long b) {
  static_assert(Columns == 128 || Columns == 256, "columns of one instruction");
  if constexpr (Columns == 128 && is_half<T>) {
    WG_MULTIPLY("128", "f16", WG_NAMES0, WG_AB64, WG_SUMS64(sums, 0));
  } else if constexpr (Columns == 128) {
    WG_MULTIPLY("128", "bf16", WG_NAMES0, WG_AB64, WG_SUMS64(sums, 0));
  } else if constexpr (is_half<T>) {
    WG_MULTIPLY("256", "f16", WG_NAMES0 ", " WG_NAMES64, WG_AB128, WG_SUMS128(sums));
  } else {
    WG_MULTIPLY("256", "bf16", WG_NAMES0 ", " WG_NAMES64, WG_AB128, WG_SUMS128(sums));
  }
}

#undef WG_AB64
#undef WG_AB128
#undef WG_MULTIPLY
#undef WG_NAMES0
#undef WG_NAMES64
#undef WG_SUMS4
#undef WG_SUMS16
#undef WG_SUMS64
#undef WG_SUMS128

}  // namespace wg
