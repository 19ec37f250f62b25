// Device mathematics that the CUDA headers give to the device compiler only. Fast-math intrinsics are modelled as accurate.
#pragma once

// glibc declares these as reserved names of its own, so they must be macros.
#define __expf(x) expf(x)
#define __exp2f(x) exp2f(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __tanhf(x) tanhf(x)
#define __sincosf(x, s, c) sincosf(x, s, c)

EMU_INLINE float __fdividef(float a, float b) { return a / b; }
EMU_INLINE float fdividef(float a, float b) { return a / b; }
EMU_INLINE float __frcp_rn(float a) { return 1.0f / a; }
EMU_INLINE float __fsqrt_rn(float a) { return sqrtf(a); }
EMU_INLINE float __frsqrt_rn(float a) { return 1.0f / sqrtf(a); }
EMU_INLINE float rsqrtf(float a) { return 1.0f / sqrtf(a); }
EMU_INLINE double rsqrt(double a) { return 1.0 / sqrt(a); }
EMU_INLINE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
EMU_INLINE float __fadd_rn(float a, float b) { return a + b; }
EMU_INLINE float __fsub_rn(float a, float b) { return a - b; }
EMU_INLINE float __fmul_rn(float a, float b) { return a * b; }
EMU_INLINE float __fdiv_rn(float a, float b) { return a / b; }
EMU_INLINE float __saturatef(float a) { return a >= 0.0f ? (a <= 1.0f ? a : 1.0f) : 0.0f; }

EMU_INLINE float __int_as_float(int bits) { return ::emu::from_bits<float>(uint32_t(bits)); }
EMU_INLINE float __uint_as_float(unsigned bits) { return ::emu::from_bits<float>(bits); }
EMU_INLINE int __float_as_int(float value) { return int(::emu::to_bits(value)); }
EMU_INLINE unsigned __float_as_uint(float value) { return unsigned(::emu::to_bits(value)); }
EMU_INLINE float __int2float_rn(int value) { return float(value); }
EMU_INLINE float __uint2float_rn(unsigned value) { return float(value); }
EMU_INLINE int __float2int_rn(float value) { return int(lrintf(value)); }
EMU_INLINE int __float2int_rd(float value) { return int(floorf(value)); }
EMU_INLINE int __float2int_rz(float value) { return int(value); }

EMU_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
EMU_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
EMU_INLINE int __ffs(int x) { return __builtin_ffs(x); }
EMU_INLINE int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
EMU_INLINE int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
EMU_INLINE unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
EMU_INLINE unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t both = (uint64_t(high) << 32) | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned((both >> (8 * ((selector >> (4 * i)) & 7))) & 0xff) << (8 * i);
  return result;
}

template <class A, class B>
EMU_INLINE auto min(A a, B b) -> std::common_type_t<A, B> {
  return a < b ? a : b;
}
template <class A, class B>
EMU_INLINE auto max(A a, B b) -> std::common_type_t<A, B> {
  return a < b ? b : a;
}
