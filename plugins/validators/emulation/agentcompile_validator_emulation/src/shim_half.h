// Conversions of half by the processor where it has them (F16C): the same bits as the CUDA headers' own for the host, which take
// a loop per element, and half of an emulated fp16 kernel's time. Every NaN is the one that a GPU gives.
#pragma once

#ifdef __F16C__
namespace emu {
typedef float Float4 __attribute__((vector_size(16)));
typedef short Short8 __attribute__((vector_size(16)));

EMU_INLINE float half_to_float(unsigned short bits) {
  if ((bits & 0x7fff) > 0x7c00) return from_bits<float>(uint32_t(0x7fffffff));
  return __builtin_ia32_vcvtph2ps(Short8{short(bits)})[0];
}
EMU_INLINE unsigned short float_to_half(float value) {
  return value != value ? 0x7fff : static_cast<unsigned short>(__builtin_ia32_vcvtps2ph(Float4{value}, 0)[0]);  // 0: to nearest even
}
EMU_INLINE float half_to_float(__half value) { return half_to_float(static_cast<__half_raw>(value).x); }
EMU_INLINE float2 halves_to_floats(__half2 value) {
  const __half2_raw raw = static_cast<__half2_raw>(value);
  return {half_to_float(raw.x), half_to_float(raw.y)};
}
EMU_INLINE __half to_half(float value) {
  __half_raw raw;
  raw.x = float_to_half(value);
  return raw;
}
EMU_INLINE __half2 to_halves(float low, float high) {
  __half2_raw raw;
  raw.x = float_to_half(low), raw.y = float_to_half(high);
  return raw;
}
}  // namespace emu

#define __half2float(value) ::emu::half_to_float(value)
#define __half22float2(value) ::emu::halves_to_floats(value)
#define __float2half_rn(value) ::emu::to_half(value)
#define __float2half(value) ::emu::to_half(value)
#define __floats2half2_rn(low, high) ::emu::to_halves(low, high)
#endif
