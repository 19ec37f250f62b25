// Warpgroup products (wgmma, sm_90a): four warps multiply 64 rows by Columns columns, both factors read from shared memory; and the copy
// engine that brings them there (cp.async.bulk.tensor). Each exists once for the GPU and once, under CUDA_EMU, as a call into the emulator,
// which reads descriptors as the hardware does.
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

template <class T> constexpr bool is_half = false;
template <> constexpr bool is_half<__half> = true;

// Whether one instruction makes so many columns here. The hardware knows all multiples of 8.
template <int Columns> constexpr bool is_width = Columns == 64 || Columns == 128 || Columns == 192 || Columns == 256;

// What the copy engine needs to fetch tiles of a factor by itself: a CUtensorMap of four axes. In the emulator, what module.py mirrors.
struct alignas(64) Tiles {
  unsigned char bytes[128];
};

// An address of shared memory as instructions and descriptors have it.
__device__ __forceinline__ unsigned shared_address(const void* shared) {
#ifdef CUDA_EMU
  return ::emu::shared_window_address(shared);
#else
  return ac::shared_address(shared);
#endif
}

// What the hardware is told of a slice: its address, how far apart panels and groups of eight spans are, the swizzle.
__device__ __forceinline__ unsigned long long descriptor(const void* shared) {
  constexpr unsigned long long panels = panel_spans * 128 / 16;
  constexpr unsigned long long groups = eight_spans / 16;
  constexpr unsigned long long swizzle_128_bytes = 1ull << 62;
  return (shared_address(shared) & 0x3ffffu) >> 4 | panels << 16 | groups << 32 | swizzle_128_bytes;
}

// How far a descriptor moves from 16 terms to the next 16.
template <bool ByTerms> constexpr unsigned long long next_terms = (ByTerms ? 16 * 2 : 16 * 128) / 16;

#ifdef CUDA_EMU

// Declares `unsigned char* name`, the start of the block's dynamic shared memory (aligned to 1,024 bytes).
#define WG_DYNAMIC_SHARED(name) unsigned char* const name = static_cast<unsigned char*>(::emu::dynamic_shared())

inline void fence() { ::emu::warpgroup_fence(); }
inline void commit() { ::emu::warpgroup_commit(); }
template <int Pending> inline void wait() { ::emu::warpgroup_wait(Pending); }
template <int Count> inline void settle(float (&sums)[Count]) { ::emu::warpgroup_settle(sums); }
template <int Count> inline void shrink_registers() {
  static_assert(Count >= 24 && Count <= 256 && Count % 8 == 0, "registers");
  ::emu::shrink_registers(Count);
}
template <int Count> inline void grow_registers() {
  static_assert(Count >= 24 && Count <= 256 && Count % 8 == 0, "registers");
  ::emu::grow_registers(Count);
}
inline void prefetch(const Tiles&) {}
inline void proxy_fence() { ::emu::proxy_fence(); }
template <int Cluster>
inline void fetch(void* shared, const Tiles& tiles, int along, int across, int inner, int outer, ac::Mbarrier* barrier,
                  unsigned short blocks) {
  ::emu::fetch_tile(shared, tiles.bytes, {along, across, inner, outer}, barrier, Cluster == 1 ? 0u : blocks);
}
inline void arrive_in_cluster(ac::Mbarrier* barrier, unsigned rank) { ::emu::arrive_in_cluster(barrier, rank); }

template <class T, int Columns, bool ByTermsA, bool ByTermsB, bool Adds = true>
inline void multiply(float (&sums)[Columns / 2], unsigned long long a, unsigned long long b) {
  static_assert(is_width<Columns>, "columns of one instruction");
  ::emu::warpgroup_multiply({sums, nullptr, a, b, Columns, is_half<T>, Adds, ByTermsA, ByTermsB});
}
template <class T, int Columns, bool ByTermsB>
inline void multiply(float (&sums)[Columns / 2], const unsigned (&a)[4], unsigned long long b) {
  static_assert(is_width<Columns>, "columns of one instruction");
  ::emu::warpgroup_multiply({sums, a, 0, b, Columns, is_half<T>, true, true, ByTermsB});
}

#else  // the GPU

#define WG_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending> __device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Sums that were waited for; nothing that reads them moves in front of the wait.
template <int Count> __device__ __forceinline__ void settle(float (&sums)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Registers of each thread of the warpgroup from here on; those that it gives back are for the others to take.
template <int Count> __device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count> __device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

// What this thread has written to shared memory by itself, or by copies that it has waited for, is there for products of whoever learns of
// it hereafter: those read through the asynchronous proxy.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

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
#define WG_SUMS32(s, i) WG_SUMS16(s, i), WG_SUMS16(s, i + 16)
#define WG_SUMS64(s) WG_SUMS32(s, 0), WG_SUMS32(s, 32)
#define WG_SUMS96(s) WG_SUMS64(s), WG_SUMS32(s, 64)
#define WG_SUMS128(s) WG_SUMS96(s), WG_SUMS32(s, 96)
#define WG_NAMES32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WG_NAMES64 \
  WG_NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WG_NAMES96 \
  WG_NAMES64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WG_NAMES128 \
  WG_NAMES96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define WG_TEXT(columns, type, names, adds, factors)                                                                                     \
  "{ .reg .pred adds; setp.ne.b32 adds, " adds ", 0; wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" names "}, " \
  factors "; }"
#define WG_MULTIPLY(columns, names, adds, factors, sums, inputs)                    \
  if constexpr (is_half<T>) {                                                       \
    asm volatile(WG_TEXT(columns, "f16", names, adds, factors) : sums : inputs);    \
  } else {                                                                          \
    asm volatile(WG_TEXT(columns, "bf16", names, adds, factors) : sums : inputs);   \
  }
#define WG_FROM_SHARED "n"(Adds ? 1 : 0), "l"(a), "l"(b), "n"(ByTermsA ? 0 : 1), "n"(ByTermsB ? 0 : 1)
#define WG_FROM_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ByTermsB ? 0 : 1)

// Makes `sums`, which nobody may touch until `wait`, of 16 terms of 64 rows times Columns columns, or adds those (`Adds`). Element
// 4 j + 2 h + e of a lane is that of row 16 (warp % 4) + 8 h + lane / 4 and column 8 j + 2 (lane % 4) + e.
template <class T, int Columns, bool ByTermsA, bool ByTermsB, bool Adds = true>
__device__ __forceinline__ void multiply(float (&sums)[Columns / 2], unsigned long long a, unsigned long long b) {
  static_assert(is_width<Columns>, "columns of one instruction");
  if constexpr (Columns == 64) {
    WG_MULTIPLY("64", WG_NAMES32, "%32", "%33, %34, adds, 1, 1, %35, %36", WG_SUMS32(sums, 0), WG_FROM_SHARED);
  } else if constexpr (Columns == 128) {
    WG_MULTIPLY("128", WG_NAMES64, "%64", "%65, %66, adds, 1, 1, %67, %68", WG_SUMS64(sums), WG_FROM_SHARED);
  } else if constexpr (Columns == 192) {
    WG_MULTIPLY("192", WG_NAMES96, "%96", "%97, %98, adds, 1, 1, %99, %100", WG_SUMS96(sums), WG_FROM_SHARED);
  } else {
    WG_MULTIPLY("256", WG_NAMES128, "%128", "%129, %130, adds, 1, 1, %131, %132", WG_SUMS128(sums), WG_FROM_SHARED);
  }
}

// Adds the same, of rows that lie in registers: pair 2 c + h of a lane holds terms 8 c + 2 (lane % 4) and the next of row
// 16 (warp % 4) + 8 h + lane / 4. Nobody may touch them either.
template <class T, int Columns, bool ByTermsB>
__device__ __forceinline__ void multiply(float (&sums)[Columns / 2], const unsigned (&a)[4], unsigned long long b) {
  static_assert(is_width<Columns>, "columns of one instruction");
  if constexpr (Columns == 64) {
    WG_MULTIPLY("64", WG_NAMES32, "1", "{%32, %33, %34, %35}, %36, adds, 1, 1, %37", WG_SUMS32(sums, 0), WG_FROM_REGISTERS);
  } else if constexpr (Columns == 128) {
    WG_MULTIPLY("128", WG_NAMES64, "1", "{%64, %65, %66, %67}, %68, adds, 1, 1, %69", WG_SUMS64(sums), WG_FROM_REGISTERS);
  } else if constexpr (Columns == 192) {
    WG_MULTIPLY("192", WG_NAMES96, "1", "{%96, %97, %98, %99}, %100, adds, 1, 1, %101", WG_SUMS96(sums), WG_FROM_REGISTERS);
  } else {
    WG_MULTIPLY("256", WG_NAMES128, "1", "{%128, %129, %130, %131}, %132, adds, 1, 1, %133", WG_SUMS128(sums), WG_FROM_REGISTERS);
  }
}

#undef WG_SUMS4
#undef WG_SUMS16
#undef WG_SUMS32
#undef WG_SUMS64
#undef WG_SUMS96
#undef WG_SUMS128
#undef WG_NAMES32
#undef WG_NAMES64
#undef WG_NAMES96
#undef WG_NAMES128
#undef WG_TEXT
#undef WG_MULTIPLY
#undef WG_FROM_SHARED
#undef WG_FROM_REGISTERS

#endif  // CUDA_EMU

// The places of a ring, one after the other; `parity` is that of the phase in which the place is filled.
template <int Stages> struct Turn {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace wg
