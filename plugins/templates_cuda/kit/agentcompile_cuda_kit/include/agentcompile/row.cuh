// Row operations that kernels share: the norms, in the framework's roundings, and their staging in shared memory.
//
// Let T be the tensors' type, r = rsqrt(mean(x^2) + eps) in fp32, everything else in fp32 until "T(...)" rounds it.
//   rms           T(w * T(x r))               HuggingFace Llama, Qwen, Mistral
//   rms_one_plus  T(x r (1 + w))              HuggingFace Gemma
//   rms_once      T(x r w)                    torch RMSNorm; w may be absent
//   layer         T((x - mean) r w + b)       torch LayerNorm, r = rsqrt(var + eps); w and b may be absent
#pragma once
#include <agentcompile/dtype.cuh>
#include <agentcompile/reduce.cuh>

namespace ac {

enum Norm : int { norm_none = 0, norm_rms = 1, norm_rms_one_plus = 2, norm_layer = 3, norm_rms_once = 4 };

// What a norm needs to know about its row; mean is 0 for the RMS norms.
struct RowStatistics {
  float mean;
  float inverse;
};

// One element of a normalized row before the outermost rounding above. `scale` is the norm weight (1 where there is none),
// `shift` the bias (0 where there is none; used by `layer` only).
template <int Kind, class T>
__device__ __forceinline__ float normalize_unrounded(float x, RowStatistics row, float scale, float shift) {
  if constexpr (Kind == norm_rms) {
    return scale * round_to<T>(x * row.inverse);
  } else if constexpr (Kind == norm_rms_one_plus) {
    return x * row.inverse * (1.0f + scale);
  } else if constexpr (Kind == norm_rms_once) {
    return x * row.inverse * scale;
  } else if constexpr (Kind == norm_layer) {
    return (x - row.mean) * row.inverse * scale + shift;
  } else {
    return x;
  }
}

// The same rounded: a value of T held in a float.
template <int Kind, class T>
__device__ __forceinline__ float normalize(float x, RowStatistics row, float scale, float shift) {
  const float value = normalize_unrounded<Kind, T>(x, row, scale, shift);
  return Kind == norm_none ? value : round_to<T>(value);
}

// Statistics of a row of `columns` elements spread over `Warps` warps. `each(f)` calls f(x) for every element that this
// thread holds, and is called once (RMS) or twice (layer: the mean first, then squared deviations, since
// mean(x^2) - mean^2 cancels where the mean is large). `scratch`: Warps floats in shared memory. `Last`: see block_sum.
template <int Kind, int Warps, bool Last = false, class Each, class Barrier = BlockBarrier>
__device__ __forceinline__ RowStatistics row_statistics(Each each, int columns, float eps, float* scratch, int warp,
                                                        int lane, Barrier barrier = {}) {
  const float per_element = 1.0f / static_cast<float>(columns);
  RowStatistics row{0.0f, 1.0f};
  if constexpr (Kind == norm_none) return row;
  if constexpr (Kind == norm_layer) {
    float sum = 0.0f;
    each([&](float x) { sum += x; });
    row.mean = block_sum<Warps>(sum, scratch, warp, lane, barrier) * per_element;
  }
  float squares = 0.0f;
  each([&](float x) { squares = fmaf(x - row.mean, x - row.mean, squares); });
  row.inverse = rsqrtf(block_sum<Warps, Last>(squares, scratch, warp, lane, barrier) * per_element + eps);
  return row;
}

// As many elements of type X as a Vector of T has: that very Vector where the types are one.
template <class X, class T, class Vector, int Size> struct RowVector {
  using type = ac::Vector<X, Size>;
  static constexpr bool is_plain = false;
};
template <class X, class T, class Vector> struct RowVector<X, T, Vector, 1> {
  using type = Vec1<X>;
  static constexpr bool is_plain = false;
};
template <class T, class Vector, int Size> struct RowVector<T, T, Vector, Size> {
  using type = Vector;
  static constexpr bool is_plain = true;
};
template <class T, class Vector> struct RowVector<T, T, Vector, 1> {
  using type = Vector;
  static constexpr bool is_plain = true;
};

// Nothing before the norm of a RowStage.
struct NothingBefore {
  static constexpr bool exists = false;
};

// Before the norm of a RowStage: an RMS norm of its own, of which the sum with a residual is what is normalized, and written to `out`
// where that is not null. Rounded as the framework does with separate operators: the norm, and the sum. `prefetch` may run before the
// grid dependency wait, as that of RowStage.
template <int Kind, int Threads, int Held, class T, class Vector> struct SumBefore {
  static constexpr bool exists = true;
  static constexpr int kind = Kind;
  static constexpr int size = Vector::size;
  static_assert(Kind == norm_rms || Kind == norm_rms_one_plus || Kind == norm_rms_once, "an RMS norm");
  const T* weight;
  const T* residual;
  T* out;
  float eps;
  Vector scale[Held];
  Vector added[Held];

  __device__ __forceinline__ Vector scale_of(int index, int vectors) const {
    if (weight != nullptr && index < vectors) return Vector::load(weight + index * size);
    float values[size];
#pragma unroll
    for (int lane = 0; lane < size; ++lane) values[lane] = Kind == norm_rms_one_plus ? 0.0f : 1.0f;
    return Vector::pack(values);
  }

  __device__ __forceinline__ void prefetch(int vectors, int thread) {
#pragma unroll
    for (int held = 0; held < Held; ++held) scale[held] = scale_of(thread + held * Threads, vectors);
  }

  __device__ __forceinline__ void load(int vectors, int thread) {
#pragma unroll
    for (int held = 0; held < Held; ++held) {
      const int index = thread + held * Threads;
      added[held] = index < vectors ? Vector::load(residual + index * size) : Vector::zero();
    }
  }

  __device__ __forceinline__ Vector sum(const Vector& given, const Vector& scaled, const Vector& other, RowStatistics row, int index) const {
    float values[size], scales[size], others[size];
    given.unpack(values);
    scaled.unpack(scales);
    other.unpack(others);
#pragma unroll
    for (int lane = 0; lane < size; ++lane) values[lane] = normalize<Kind, T>(values[lane], row, scales[lane], 0.0f) + others[lane];
    const Vector made = Vector::pack(values);
    if (out != nullptr) made.store(out + index * size);
    return made;
  }
};

// How the 16 bytes of a vector lie in shared memory: as they are, or with the two words in the middle exchanged, as operands of tensor
// cores want them. Done twice it is undone.
struct Straight {
  template <class Vector> static __device__ __forceinline__ Vector laid(const Vector& vector) { return vector; }
};
struct MiddleExchanged {
  template <class Vector> static __device__ __forceinline__ Vector laid(const Vector& vector) {
    return Vector{make_uint4(vector.bits.x, vector.bits.z, vector.bits.y, vector.bits.w)};
  }
};

// Brings a row into shared memory, normalized on the way: the prologue of kernels that read one row many times.
//
// `Vector` is Vec16<T> or Vec1<T>; a row has `vectors` of them. The first `Held` vectors of each thread stay in registers
// between the passes, so for rows up to Held * Threads vectors x is read once and never re-read; the loops over the rest are
// not unrolled, since they should rarely run. Without a norm a row of any length has Held vectors of each thread on their way at a time. `prefetch` loads the norm's weights and may run before the grid dependency
// wait; `run` reads x and must come after it.
// x is of type X, which is T or float: its elements are normalized as they are. `Before`: what is done to the row first (SumBefore),
// where X is T. `Laid`: how vectors lie in shared memory.
template <int Kind, int Threads, int Held, class T, class Vector, class X = T, class Laid = Straight> struct RowStage {
  static constexpr int size = Vector::size;
  static constexpr bool is_plain = RowVector<X, T, Vector, size>::is_plain;
  using Row = typename RowVector<X, T, Vector, size>::type;
  Vector scale[Held];
  Vector shift[Held];

  // `weight`, `bias`: the norm's, or null where it has none.
  __device__ __forceinline__ void prefetch(const T* weight, const T* bias, int vectors, int thread) {
    if constexpr (Kind != norm_none) {
#pragma unroll
      for (int held = 0; held < Held; ++held) load_affine(weight, bias, vectors, thread + held * Threads, held);
    }
  }

  // Writes the row and zeros behind it up to `padded` vectors to `staged` (16-byte aligned, shared); the barrier at the end
  // publishes it to all `Threads` threads. `scratch`: Threads / 32 floats in shared memory.
  template <class Barrier = BlockBarrier, class Before = NothingBefore>
  __device__ __forceinline__ void run(const X* x, const T* weight, const T* bias, T* staged, int vectors, int padded,
                                      float eps, float* scratch, int thread, Barrier barrier = {}, Before before = {}) {
    static_assert(is_plain || !Before::exists, "rows of T");
    if constexpr (Kind == norm_none && is_plain && !Before::exists) {
      copy(x, staged, vectors, thread);
    } else {
      change(x, weight, bias, staged, vectors, eps, scratch, thread, barrier, before);
    }
    if (vectors < padded) {
#pragma unroll 1
      for (int index = vectors + thread; index < padded; index += Threads) Vector::zero().store(staged + index * size);
    }
    barrier();
  }

 private:
  // Of a row as it is, `Held` vectors of each thread are on their way at a time.
  static __device__ __forceinline__ void copy(const X* x, T* staged, int vectors, int thread) {
#pragma unroll 1
    for (int first = thread; first < vectors; first += Held * Threads) {
      Row row[Held];
#pragma unroll
      for (int held = 0; held < Held; ++held) {
        const int index = first + held * Threads;
        row[held] = index < vectors ? Row::load(x + index * size) : Row::zero();
      }
#pragma unroll
      for (int held = 0; held < Held; ++held) {
        const int index = first + held * Threads;
        if (index < vectors) Laid::laid(row[held]).store(staged + index * size);
      }
    }
  }

  // Of a row that is normalized, summed or converted.
  template <class Barrier, class Before>
  __device__ __forceinline__ void change(const X* x, const T* weight, const T* bias, T* staged, int vectors, float eps, float* scratch,
                                         int thread, Barrier barrier, Before before) {
    Row row[Held];
    if constexpr (Before::exists) before.load(vectors, thread);
#pragma unroll
    for (int held = 0; held < Held; ++held) {
      const int index = thread + held * Threads;
      row[held] = index < vectors ? Row::load(x + index * size) : Row::zero();
    }
    if constexpr (is_plain) {
#pragma unroll 1
      for (int index = thread + Held * Threads; index < vectors; index += Threads) {
        Laid::laid(Row::load(x + index * size)).store(staged + index * size);
      }
    }
    const auto again = [&](int index) {
      if constexpr (is_plain) {
        return Laid::laid(Row::load(staged + index * size));
      } else {
        return Row::load(x + index * size);
      }
    };
    const auto each = [&](auto visit) {
#pragma unroll
      for (int held = 0; held < Held; ++held) {
        if (thread + held * Threads < vectors) visit_vector(row[held], visit);
      }
#pragma unroll 1
      for (int index = thread + Held * Threads; index < vectors; index += Threads) {
        visit_vector(again(index), visit);
      }
    };
    if constexpr (Before::exists) {
      const RowStatistics first = row_statistics<Before::kind, Threads / warp_size>(
          each, vectors * size, before.eps, scratch, thread / warp_size, thread % warp_size, barrier);
#pragma unroll
      for (int held = 0; held < Held; ++held) {
        const int index = thread + held * Threads;
        if (index < vectors) row[held] = before.sum(row[held], before.scale[held], before.added[held], first, index);
      }
#pragma unroll 1
      for (int index = thread + Held * Threads; index < vectors; index += Threads) {
        const Vector other = Vector::load(before.residual + index * size);
        Laid::laid(before.sum(again(index), before.scale_of(index, vectors), other, first, index)).store(staged + index * size);
      }
    }
    const RowStatistics statistics = row_statistics<Kind, Threads / warp_size, true>(
        each, vectors * size, eps, scratch, thread / warp_size, thread % warp_size, barrier);
#pragma unroll
    for (int held = 0; held < Held; ++held) {
      const int index = thread + held * Threads;
      if (index < vectors) Laid::laid(transform(row[held], statistics, held)).store(staged + index * size);
    }
    if constexpr (Kind != norm_none || !is_plain) {
#pragma unroll 1
      for (int index = thread + Held * Threads; index < vectors; index += Threads) {
        load_affine(weight, bias, vectors, index, 0);
        Laid::laid(transform(again(index), statistics, 0)).store(staged + index * size);
      }
    }
  }

  template <class Visit> static __device__ __forceinline__ void visit_vector(const Row& row, Visit visit) {
    float values[size];
    row.unpack(values);
#pragma unroll
    for (int lane = 0; lane < size; ++lane) visit(values[lane]);
  }

  static __device__ __forceinline__ Vector filled(float value) {
    float values[size];
#pragma unroll
    for (int lane = 0; lane < size; ++lane) values[lane] = value;
    return Vector::pack(values);
  }

  __device__ __forceinline__ void load_affine(const T* weight, const T* bias, int vectors, int index, int held) {
    const bool valid = index < vectors;
    const float neutral = Kind == norm_rms_one_plus ? 0.0f : 1.0f;
    if constexpr (Kind == norm_none) return;
    scale[held] = valid && weight != nullptr ? Vector::load(weight + index * size) : filled(neutral);
    if constexpr (Kind == norm_layer) {
      shift[held] = valid && bias != nullptr ? Vector::load(bias + index * size) : Vector::zero();
    }
  }

  __device__ __forceinline__ Vector transform(const Row& given, RowStatistics row, int held) const {
    if constexpr (Kind == norm_none && is_plain) {
      return given;
    } else if constexpr (Kind == norm_none) {
      float values[size];
      given.unpack(values);
      return Vector::pack(values);
    } else {
      float values[size], scales[size], shifts[size];
      given.unpack(values);
      if constexpr (Kind == norm_rms) {
#pragma unroll
        for (int lane = 0; lane < size; ++lane) values[lane] *= row.inverse;
        return Vector::pack(values).times(scale[held]);
      } else {
        scale[held].unpack(scales);
        if constexpr (Kind == norm_layer) shift[held].unpack(shifts);
#pragma unroll
        for (int lane = 0; lane < size; ++lane) {
          values[lane] = normalize_unrounded<Kind, T>(values[lane], row, scales[lane], Kind == norm_layer ? shifts[lane] : 0.0f);
        }
        return Vector::pack(values);
      }
    }
  }
};

// RoPE of one head whose first `rotary_dim` elements rotate in pairs; cos and sin are tables of rotary_dim entries, indexed
// by the element. Layout "half": d pairs with d + rotary_dim/2 (HuggingFace's rotate_half); "interleaved": 2i with 2i + 1.
// Products and sum are in fp32, the caller rounds once.
struct RopePartner {
  int index;   // the element that this one is rotated with
  bool upper;  // whether this one is the second of the pair, which adds the partner; the first subtracts it
};

template <bool Interleaved> __device__ __forceinline__ RopePartner rope_partner(int element, int rotary_dim) {
  if constexpr (Interleaved) {
    return RopePartner{element ^ 1, (element & 1) != 0};
  } else {
    const int half = rotary_dim / 2;
    const bool upper = element >= half;
    return RopePartner{upper ? element - half : element + half, upper};
  }
}

__device__ __forceinline__ float rope_rotate(float own, float partner, float cosine, float sine, bool upper) {
  return fmaf(upper ? partner : -partner, sine, own * cosine);
}

}  // namespace ac
