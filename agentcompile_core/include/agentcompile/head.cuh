// One attention head spread over a group of lanes, in 16-byte vectors: load, store, RMS norm and RoPE without shared memory.
//
// `Lanes` neighbouring lanes of a warp (a power of two) hold a head of `HeadDim` elements: vector j of lane l is vector
// l + j * Lanes of the head. Where the head has fewer vectors than the group has places, the rest is zero and never stored.
// All lanes of the warp take part in every call that shuffles (norm, rotate).
#pragma once
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>
#include <agentcompile/row.cuh>

namespace ac {

template <class T, int HeadDim, int Lanes> struct Head {
  using Vector = Vec16<T>;
  static constexpr int head_vectors = HeadDim / Vector::size;
  static constexpr int vectors = (head_vectors + Lanes - 1) / Lanes;  // per lane
  static constexpr int elements = vectors * Vector::size;
  static constexpr bool padded = vectors * Lanes != head_vectors;
  static_assert(HeadDim % Vector::size == 0, "a head is a whole number of 16-byte vectors");

  using Packed = Vector[vectors];
  using Slice = float[elements];

  static __device__ __forceinline__ bool inside(int vector) { return !padded || vector < head_vectors; }

  // Loads the first `count` vectors of the head, or nothing where it is not wanted; the rest of the slice becomes zero.
  static __device__ __forceinline__ void load(Packed& packed, const T* head, int lane, bool wanted = true,
                                              int count = head_vectors) {
#pragma unroll
    for (int j = 0; j < vectors; ++j) {
      const int vector = lane + j * Lanes;
      packed[j] = Vector::zero();
      const bool present = count == head_vectors ? inside(vector) : vector < count;
      if (wanted && present) packed[j].bits = load_stream16(head + vector * Vector::size);
    }
  }

  static __device__ __forceinline__ void store(const Packed& packed, T* head, int lane) {
#pragma unroll
    for (int j = 0; j < vectors; ++j) {
      const int vector = lane + j * Lanes;
      if (inside(vector)) packed[j].store(head + vector * Vector::size);
    }
  }

  static __device__ __forceinline__ void unpack(const Packed& packed, Slice& values) {
#pragma unroll
    for (int j = 0; j < vectors; ++j) {
      float chunk[Vector::size];
      packed[j].unpack(chunk);
#pragma unroll
      for (int e = 0; e < Vector::size; ++e) values[j * Vector::size + e] = chunk[e];
    }
  }

  static __device__ __forceinline__ void pack(const Slice& values, Packed& packed) {
#pragma unroll
    for (int j = 0; j < vectors; ++j) {
      float chunk[Vector::size];
#pragma unroll
      for (int e = 0; e < Vector::size; ++e) chunk[e] = values[j * Vector::size + e];
      packed[j] = Vector::pack(chunk);
    }
  }

  // RMS norm over the head, rounded as row.cuh says for `Kind`.
  template <int Kind> static __device__ __forceinline__ void norm(Slice& values, const Packed& weight, float eps) {
    if constexpr (Kind != norm_none) {
      float squares = 0.0f;
#pragma unroll
      for (int e = 0; e < elements; ++e) squares = fmaf(values[e], values[e], squares);
      const RowStatistics row{0.0f, rsqrtf(warp_sum<Lanes>(squares) / static_cast<float>(HeadDim) + eps)};
      Slice scale;
      unpack(weight, scale);
#pragma unroll
      for (int e = 0; e < elements; ++e) values[e] = normalize<Kind, T>(values[e], row, scale[e], 0.0f);
    }
  }

  // RoPE (half layout) of the first RotaryDim elements; RotaryDim / 2 is a whole number of vectors. Not rounded.
  template <int RotaryDim>
  static __device__ __forceinline__ void rotate(Slice& values, const Packed& cosine, const Packed& sine, int lane) {
    if constexpr (RotaryDim > 0) {
      constexpr int half = RotaryDim / 2 / Vector::size;
      static_assert(half * 2 * Vector::size == RotaryDim, "half of the rotary part is a whole number of 16-byte vectors");
      Slice cosines, sines, partners;
      unpack(cosine, cosines);
      unpack(sine, sines);
      find_partners<half>(values, partners, lane);
#pragma unroll
      for (int j = 0; j < vectors; ++j) {
        const int vector = lane + j * Lanes;
#pragma unroll
        for (int i = j * Vector::size; i < (j + 1) * Vector::size; ++i) {
          const float rotated = rope_rotate(values[i], partners[i], cosines[i], sines[i], vector >= half);
          values[i] = vector < 2 * half ? rotated : values[i];
        }
      }
    }
  }

 private:
  template <int Half>
  static __device__ __forceinline__ void find_partners(const Slice& values, Slice& partners, int lane) {
#pragma unroll
    for (int j = 0; j < vectors; ++j) {
      const int vector = lane + j * Lanes;
#pragma unroll
      for (int e = 0; e < Vector::size; ++e) {
        if constexpr (Half % Lanes == 0) {  // in the same lane
          constexpr int distance = Half / Lanes;
          const int other = j < distance ? j + distance : j - distance;
          partners[j * Vector::size + e] = other < vectors ? values[other * Vector::size + e] : 0.0f;
        } else {
          partners[j * Vector::size + e] = from_vector(values, vector < Half ? vector + Half : vector - Half, e);
        }
      }
    }
  }

  // Element `e` of a vector of the head, from whichever lane of the group holds it.
  static __device__ __forceinline__ float from_vector(const Slice& values, int vector, int e) {
    float found = 0.0f;
#pragma unroll
    for (int j = 0; j < vectors; ++j) {
      const float candidate = __shfl_sync(full_warp, values[j * Vector::size + e], vector & (Lanes - 1), Lanes);
      if (vectors == 1 || vector / Lanes == j) found = candidate;
    }
    return found;
  }
};

}  // namespace ac
