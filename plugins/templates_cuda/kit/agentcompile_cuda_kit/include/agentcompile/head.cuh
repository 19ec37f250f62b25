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

  // As load with all vectors, for rows of which a hint says before the dependency wait that they are complete.
  static __device__ __forceinline__ void load_settled(Packed& packed, const T* head, int lane, bool wanted) {
#pragma unroll
    for (int j = 0; j < vectors; ++j) {
      const int vector = lane + j * Lanes;
      packed[j] = Vector::zero();
      if (wanted && inside(vector)) packed[j].bits = load_settled16(head + vector * Vector::size);
    }
  }

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
#pragma unroll
      for (int j = 0; j < vectors; ++j) {
        float scale[Vector::size];
        weight[j].unpack(scale);
#pragma unroll
        for (int e = 0; e < Vector::size; ++e) {
          float& value = values[j * Vector::size + e];
          value = normalize<Kind, T>(value, row, scale[e], 0.0f);
        }
      }
    }
  }

  // RoPE of the first RotaryDim elements, in halves that are whole vectors each or, Interleaved, of neighbours in whole vectors.
  // Not rounded.
  template <int RotaryDim, bool Interleaved = false>
  static __device__ __forceinline__ void rotate(Slice& values, const Packed& cosine, const Packed& sine, int lane) {
    if constexpr (Interleaved) {
      static_assert(RotaryDim % Vector::size == 0, "the rotary part is a whole number of 16-byte vectors");
      rotate_neighbours<RotaryDim / Vector::size>(values, cosine, sine, lane);
    } else if constexpr (RotaryDim > 0) {
      constexpr int half = RotaryDim / 2 / Vector::size;
      static_assert(half * 2 * Vector::size == RotaryDim, "half of the rotary part is a whole number of 16-byte vectors");
      if constexpr (half % Lanes == 0) {
        rotate_in_lane<half / Lanes>(values, cosine, sine);
      } else {
        rotate_across<half>(values, cosine, sine, lane);
      }
    }
  }

 private:
  // Both elements of a pair are in the same vector, of which the first Count of the head rotate.
  template <int Count>
  static __device__ __forceinline__ void rotate_neighbours(Slice& values, const Packed& cosine, const Packed& sine, int lane) {
#pragma unroll
    for (int j = 0; j < vectors; ++j) {
      if (lane + j * Lanes >= Count) continue;
      float cosines[Vector::size], sines[Vector::size];
      cosine[j].unpack(cosines);
      sine[j].unpack(sines);
#pragma unroll
      for (int pair = 0; pair < Vector::size / 2; ++pair) {
        const int e = 2 * pair;
        float& even = values[j * Vector::size + e];
        float& odd = values[j * Vector::size + e + 1];
        const float rotated = rope_rotate(even, odd, cosines[e], sines[e], false);
        odd = rope_rotate(odd, even, cosines[e + 1], sines[e + 1], true);
        even = rotated;
      }
    }
  }

  // Both elements of a pair are in the same lane: vectors j and j + Distance.
  template <int Distance>
  static __device__ __forceinline__ void rotate_in_lane(Slice& values, const Packed& cosine, const Packed& sine) {
#pragma unroll
    for (int j = 0; j < Distance; ++j) {
      float cosines[2][Vector::size], sines[2][Vector::size];
      cosine[j].unpack(cosines[0]);
      cosine[j + Distance].unpack(cosines[1]);
      sine[j].unpack(sines[0]);
      sine[j + Distance].unpack(sines[1]);
#pragma unroll
      for (int e = 0; e < Vector::size; ++e) {
        float& lower = values[j * Vector::size + e];
        float& upper = values[(j + Distance) * Vector::size + e];
        const float rotated = rope_rotate(lower, upper, cosines[0][e], sines[0][e], false);
        upper = rope_rotate(upper, lower, cosines[1][e], sines[1][e], true);
        lower = rotated;
      }
    }
  }

  template <int Half>
  static __device__ __forceinline__ void rotate_across(Slice& values, const Packed& cosine, const Packed& sine, int lane) {
    Slice rotated;
#pragma unroll
    for (int j = 0; j < vectors; ++j) {
      const int vector = lane + j * Lanes;
      const bool upper = vector >= Half;
      float cosines[Vector::size], sines[Vector::size];
      cosine[j].unpack(cosines);
      sine[j].unpack(sines);
#pragma unroll
      for (int e = 0; e < Vector::size; ++e) {
        const float own = values[j * Vector::size + e];
        const float partner = from_vector(values, upper ? vector - Half : vector + Half, e);
        rotated[j * Vector::size + e] = vector < 2 * Half ? rope_rotate(own, partner, cosines[e], sines[e], upper) : own;
      }
    }
#pragma unroll
    for (int i = 0; i < elements; ++i) values[i] = rotated[i];
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
