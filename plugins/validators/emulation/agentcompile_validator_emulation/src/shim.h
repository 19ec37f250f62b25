// Lets g++ compile CUDA C++ kernel source for the CPU; force-included before the kernel. The real CUDA headers supply vector
// types, half and bfloat16; this file supplies the language's keywords, built-in variables and warp and block intrinsics.
#pragma once
#ifdef __CUDACC__
#error "shim.h is for the host compiler only"
#endif
#define CUDA_EMU 1

// The special functions of C++17 (Bessel, zeta, ...) are looked at again in every kernel: 20 ms each. CUDA has none of them in std.
#include <bits/c++config.h>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS

#include <math.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "interface.h"

#include <vector_functions.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// --- keywords ------------------------------------------------------------------------------------------------------
#undef __shared__
#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __launch_bounds__
#undef __forceinline__
#undef __noinline__
#undef __grid_constant__
#define __shared__ static __attribute__((section("emu_shared")))  // one section: poisoned and tracked per block
// Guards of the section: one before and one behind all shared variables of the unit, in whichever order the compiler lays them.
#define EMU_SHARED_GUARD(name) static __attribute__((section("emu_shared"), used)) char name[::emu::shared_guard_bytes];
EMU_SHARED_GUARD(emu_shared_guard_before)
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __builtin_assume(condition) ((void)0)

#define threadIdx (::emu::current->thread_index)
#define blockIdx (::emu::current->block_index)
#define blockDim (::emu::current->block_dim)
#define gridDim (::emu::current->grid_dim)
static constexpr int warpSize = 32;

#define EMU_INLINE static inline __attribute__((always_inline, unused))

// --- block and warp intrinsics -------------------------------------------------------------------------------------
#define __syncthreads() ::emu::block_barrier(__LINE__)
#define __syncthreads_count(p) ::emu::block_barrier_reduce(__LINE__, (p), ::emu::Predicate::count)
#define __syncthreads_and(p) ::emu::block_barrier_reduce(__LINE__, (p), ::emu::Predicate::all)
#define __syncthreads_or(p) ::emu::block_barrier_reduce(__LINE__, (p), ::emu::Predicate::any)

EMU_INLINE void __syncwarp(unsigned mask = 0xffffffffu) { ::emu::warp_barrier(mask); }
EMU_INLINE unsigned __activemask() { return ::emu::active_mask(); }
EMU_INLINE unsigned __ballot_sync(unsigned mask, int p) { return ::emu::warp_ballot(mask, p); }
EMU_INLINE int __any_sync(unsigned mask, int p) { return ::emu::warp_ballot(mask, p) != 0; }
EMU_INLINE int __all_sync(unsigned mask, int p) { return ::emu::warp_ballot(mask, p) == mask; }
template <class T>
EMU_INLINE unsigned __match_any_sync(unsigned mask, T value) {
  return ::emu::warp_match_any(mask, ::emu::to_bits(value));
}

// A lane whose source lies outside its segment of `width` lanes keeps its own value.
template <class T>
EMU_INLINE T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = int(::emu::current->lane);
  const int from = (lane & ~(width - 1)) | (source & (width - 1));
  return ::emu::from_bits<T>(::emu::warp_shuffle(mask, ::emu::to_bits(value), from));
}
template <class T>
EMU_INLINE T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const int lane = int(::emu::current->lane), from = lane ^ lane_mask;
  const bool inside = from < (lane & ~(width - 1)) + width;
  return ::emu::from_bits<T>(::emu::warp_shuffle(mask, ::emu::to_bits(value), inside ? from : lane));
}
template <class T>
EMU_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = int(::emu::current->lane), from = lane + int(delta);
  const bool inside = from < (lane & ~(width - 1)) + width;
  return ::emu::from_bits<T>(::emu::warp_shuffle(mask, ::emu::to_bits(value), inside ? from : lane));
}
template <class T>
EMU_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = int(::emu::current->lane), from = lane - int(delta);
  const bool inside = from >= (lane & ~(width - 1));
  return ::emu::from_bits<T>(::emu::warp_shuffle(mask, ::emu::to_bits(value), inside ? from : lane));
}

#define EMU_REDUCE(name, T, kind) \
  EMU_INLINE T name(unsigned mask, T value) { return T(::emu::warp_reduce(mask, unsigned(value), ::emu::Reduction::kind)); }
EMU_REDUCE(__reduce_add_sync, unsigned, add)
EMU_REDUCE(__reduce_add_sync, int, add)
EMU_REDUCE(__reduce_min_sync, unsigned, min_unsigned)
EMU_REDUCE(__reduce_min_sync, int, min_signed)
EMU_REDUCE(__reduce_max_sync, unsigned, max_unsigned)
EMU_REDUCE(__reduce_max_sync, int, max_signed)
EMU_REDUCE(__reduce_and_sync, unsigned, bit_and)
EMU_REDUCE(__reduce_or_sync, unsigned, bit_or)
EMU_REDUCE(__reduce_xor_sync, unsigned, bit_xor)
#undef EMU_REDUCE

#include "shim_half.h"
#include "shim_math.h"
#include "shim_memory.h"

// --- kernel entries ------------------------------------------------------------------------------------------------
namespace emu {
template <class... A, size_t... I>
EMU_UNCHECKED inline void call_kernel(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
}
template <class... A>
EMU_UNCHECKED inline void call_kernel(void (*kernel)(A...), void** arguments) {
  call_kernel(kernel, arguments, std::index_sequence_for<A...>{});
}
}  // namespace emu

// Once, behind the kernels' source.
#define EMU_GUARDS()                       \
  EMU_SHARED_GUARD(emu_shared_guard_behind) \
  static const bool emu_guarded = (::emu::register_shared_guards(emu_shared_guard_before, emu_shared_guard_behind), true);

// One line per entry, after the kernel's source: makes it launchable by name with a void** argument array.
#define EMU_EXPORT(kernel)                                                                              \
  EMU_UNCHECKED static void emu_call_##kernel(void** arguments) { ::emu::call_kernel(&kernel, arguments); } \
  static const bool emu_registered_##kernel = (::emu::register_kernel(#kernel, &emu_call_##kernel), true);
