// Element types and 16-byte vectors: float, __half and __nv_bfloat16 to and from fp32.
//
// Every kernel computes in fp32 and rounds (to nearest even) where its contract stores or rounds; `round_to<T>` is that
// rounding kept in a float. For T = float all of it is the identity, so fp32 models are never rounded.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace ac {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T> struct FromFloat;
template <> struct FromFloat<float> {
  static __device__ __forceinline__ float convert(float value) { return value; }
};
template <> struct FromFloat<__half> {
  static __device__ __forceinline__ __half convert(float value) { return __float2half_rn(value); }
};
template <> struct FromFloat<__nv_bfloat16> {
  // By the instruction that converts pairs: the compiler turns __float2bfloat16_rn into one of a quarter of its rate (sm_90: F2F, 16 results
  // per clock and SM).
  static __device__ __forceinline__ __nv_bfloat16 convert(float value) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(value, 0.0f);
    return *reinterpret_cast<const __nv_bfloat16*>(&both);
  }
};

template <class T> __device__ __forceinline__ T from_float(float value) { return FromFloat<T>::convert(value); }

// The value a tensor of type T would hold, still as a float.
template <class T> __device__ __forceinline__ float round_to(float value) { return to_float(from_float<T>(value)); }

// Two neighbouring 16-bit elements in one 32-bit register, as the conversion instructions want them. `multiply`, `add` and `subtract`
// round once, and are never fused: what products in fp32, which are exact, and sums in fp32, which have twice the digits and two more,
// are when they are rounded.
template <class Both> struct PairOf {
  static __device__ __forceinline__ unsigned int multiply(unsigned int a, unsigned int b) { return word(__hmul2_rn(both(a), both(b))); }
  static __device__ __forceinline__ unsigned int add(unsigned int a, unsigned int b) { return word(__hadd2_rn(both(a), both(b))); }
  static __device__ __forceinline__ unsigned int subtract(unsigned int a, unsigned int b) { return word(__hsub2_rn(both(a), both(b))); }

 protected:
  static __device__ __forceinline__ Both both(unsigned int word) { return *reinterpret_cast<const Both*>(&word); }
  static __device__ __forceinline__ unsigned int word(Both both) { return *reinterpret_cast<const unsigned int*>(&both); }
};
template <class T> struct Pair;
template <> struct Pair<__half> : PairOf<__half2> {
  static __device__ __forceinline__ float2 unpack(unsigned int word) { return __half22float2(both(word)); }
  static __device__ __forceinline__ unsigned int pack(float low, float high) { return word(__floats2half2_rn(low, high)); }
};
template <> struct Pair<__nv_bfloat16> : PairOf<__nv_bfloat162> {
  static __device__ __forceinline__ float2 unpack(unsigned int word) { return __bfloat1622float2(both(word)); }
  static __device__ __forceinline__ unsigned int pack(float low, float high) { return word(__floats2bfloat162_rn(low, high)); }
};

// Of fp32 a word is one element.
template <> struct Pair<float> {
  static __device__ __forceinline__ unsigned int multiply(unsigned int a, unsigned int b) {
    return __float_as_uint(__fmul_rn(__uint_as_float(a), __uint_as_float(b)));
  }
  static __device__ __forceinline__ unsigned int add(unsigned int a, unsigned int b) {
    return __float_as_uint(__fadd_rn(__uint_as_float(a), __uint_as_float(b)));
  }
  static __device__ __forceinline__ unsigned int subtract(unsigned int a, unsigned int b) {
    return __float_as_uint(__fsub_rn(__uint_as_float(a), __uint_as_float(b)));
  }
};

// 16 bytes = 8 (16-bit types) or 4 (float) consecutive elements, moved by one instruction. The address must be a
// multiple of 16 bytes. `load` is an ordinary coherent load; streaming loads of weights are in ptx.cuh.
template <class T> struct Vec16 {
  static constexpr int size = 16 / sizeof(T);
  uint4 bits;

  static __device__ __forceinline__ Vec16 load(const T* address) {
    return Vec16{*reinterpret_cast<const uint4*>(address)};
  }
  static __device__ __forceinline__ Vec16 zero() { return Vec16{make_uint4(0u, 0u, 0u, 0u)}; }
  __device__ __forceinline__ void store(T* address) const { *reinterpret_cast<uint4*>(address) = bits; }

  __device__ __forceinline__ void unpack(float (&values)[size]) const {
    unpack_word(bits.x, values, 0);
    unpack_word(bits.y, values, 1);
    unpack_word(bits.z, values, 2);
    unpack_word(bits.w, values, 3);
  }
  static __device__ __forceinline__ Vec16 pack(const float (&values)[size]) {
    return Vec16{make_uint4(pack_word(values, 0), pack_word(values, 1), pack_word(values, 2), pack_word(values, 3))};
  }
  // Elements 2 w and 2 w + 1, of 16 bits.
  __device__ __forceinline__ float2 pair(int w) const { return Pair<T>::unpack((&bits.x)[w]); }
  __device__ __forceinline__ void set_pair(int w, float low, float high) { (&bits.x)[w] = Pair<T>::pack(low, high); }

  // Element by element, each rounded to T.
  __device__ __forceinline__ Vec16 times(const Vec16& other) const {
    return by_words(other, [](unsigned int a, unsigned int b) { return Pair<T>::multiply(a, b); });
  }
  __device__ __forceinline__ Vec16 plus(const Vec16& other) const {
    return by_words(other, [](unsigned int a, unsigned int b) { return Pair<T>::add(a, b); });
  }
  __device__ __forceinline__ Vec16 minus(const Vec16& other) const {
    return by_words(other, [](unsigned int a, unsigned int b) { return Pair<T>::subtract(a, b); });
  }

 private:
  static __device__ __forceinline__ void unpack_word(unsigned int word, float (&values)[size], int index) {
    if constexpr (sizeof(T) == 4) {
      values[index] = *reinterpret_cast<const float*>(&word);
    } else {
      const float2 both = Pair<T>::unpack(word);
      values[2 * index] = both.x;
      values[2 * index + 1] = both.y;
    }
  }
  static __device__ __forceinline__ unsigned int pack_word(const float (&values)[size], int index) {
    if constexpr (sizeof(T) == 4) {
      return *reinterpret_cast<const unsigned int*>(&values[index]);
    } else {
      return Pair<T>::pack(values[2 * index], values[2 * index + 1]);
    }
  }
  template <class Each>
  __device__ __forceinline__ Vec16 by_words(const Vec16& other, Each each) const {
    return Vec16{make_uint4(each(bits.x, other.bits.x), each(bits.y, other.bits.y), each(bits.z, other.bits.z), each(bits.w, other.bits.w))};
  }
};

// Size neighbouring elements as they lie in memory: 4, 8 or a multiple of 16 bytes, moved by as few instructions as possible. The
// address must be a multiple of these bytes, of 16 at most.
template <class T, int Size> struct Vector {
  static constexpr int words = Size * static_cast<int>(sizeof(T)) / 4;
  static_assert(words == 1 || words == 2 || (words > 0 && words % 4 == 0), "a vector has 4, 8 or a multiple of 16 bytes");
  unsigned int bits[words];

  static __device__ __forceinline__ Vector load(const T* address) {
    Vector vector;
    if constexpr (words == 1) {
      vector.bits[0] = *reinterpret_cast<const unsigned int*>(address);
    } else if constexpr (words == 2) {
      const uint2 pair = *reinterpret_cast<const uint2*>(address);
      vector.bits[0] = pair.x;
      vector.bits[1] = pair.y;
    } else {
#pragma unroll
      for (int w = 0; w < words; w += 4) {
        const uint4 four = reinterpret_cast<const uint4*>(address)[w / 4];
        vector.bits[w] = four.x;
        vector.bits[w + 1] = four.y;
        vector.bits[w + 2] = four.z;
        vector.bits[w + 3] = four.w;
      }
    }
    return vector;
  }
  static __device__ __forceinline__ Vector zero() {
    Vector vector;
#pragma unroll
    for (int w = 0; w < words; ++w) vector.bits[w] = 0u;
    return vector;
  }
  __device__ __forceinline__ void store(T* address) const {
    if constexpr (words == 1) {
      *reinterpret_cast<unsigned int*>(address) = bits[0];
    } else if constexpr (words == 2) {
      *reinterpret_cast<uint2*>(address) = make_uint2(bits[0], bits[1]);
    } else {
#pragma unroll
      for (int w = 0; w < words; w += 4) {
        reinterpret_cast<uint4*>(address)[w / 4] = make_uint4(bits[w], bits[w + 1], bits[w + 2], bits[w + 3]);
      }
    }
  }

  __device__ __forceinline__ void unpack(float (&values)[Size]) const {
#pragma unroll
    for (int w = 0; w < words; ++w) {
      if constexpr (sizeof(T) == 4) {
        values[w] = *reinterpret_cast<const float*>(&bits[w]);
      } else {
        const float2 both = Pair<T>::unpack(bits[w]);
        values[2 * w] = both.x;
        values[2 * w + 1] = both.y;
      }
    }
  }
  static __device__ __forceinline__ Vector pack(const float (&values)[Size]) {
    Vector vector;
#pragma unroll
    for (int w = 0; w < words; ++w) {
      if constexpr (sizeof(T) == 4) {
        vector.bits[w] = *reinterpret_cast<const unsigned int*>(&values[w]);
      } else {
        vector.bits[w] = Pair<T>::pack(values[2 * w], values[2 * w + 1]);
      }
    }
    return vector;
  }
};

// One element with the interface of Vec16, for rows whose length or address does not allow vectors.
template <class T> struct Vec1 {
  static constexpr int size = 1;
  T bits;

  static __device__ __forceinline__ Vec1 load(const T* address) { return Vec1{*address}; }
  static __device__ __forceinline__ Vec1 zero() { return Vec1{from_float<T>(0.0f)}; }
  __device__ __forceinline__ void store(T* address) const { *address = bits; }
  __device__ __forceinline__ void unpack(float (&values)[1]) const { values[0] = to_float(bits); }
  static __device__ __forceinline__ Vec1 pack(const float (&values)[1]) { return Vec1{from_float<T>(values[0])}; }
  __device__ __forceinline__ Vec1 times(const Vec1& other) const { return Vec1{from_float<T>(to_float(bits) * to_float(other.bits))}; }
};

// Whether a pointer may be used with Vec16.
template <class T> __device__ __forceinline__ bool is_aligned16(const T* address) {
  return (reinterpret_cast<unsigned long long>(address) & 15u) == 0;
}

}  // namespace ac
