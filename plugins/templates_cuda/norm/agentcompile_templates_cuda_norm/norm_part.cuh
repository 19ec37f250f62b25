// What the kernels share that deal a row out to several blocks: what a part of it adds up to, and the statistics of a row of parts.
//
// Part p of a row is its elements p * Plan::part .. end_of(p) - 1, held by the threads of one block. Its squares are those around its
// own mean, which is moved to the row's when parts are added up: mean(x^2) - mean^2 would cancel where the mean is large.
#pragma once
#include "norm_row.cuh"

namespace {

constexpr int warps = Plan::threads / ac::warp_size;
constexpr int vectors = Plan::vectors;  // per thread: threads * vectors * step >= part
constexpr int columns = Plan::columns;
constexpr bool layer = Plan::norm == ac::norm_layer;

__device__ __forceinline__ int first_of(int i) {
  return blockIdx.x * Plan::part + (i * Plan::threads + static_cast<int>(threadIdx.x)) * step;
}
__device__ __forceinline__ int end_of(int part) { return min((part + 1) * Plan::part, columns); }

struct Figures {
  float squares;
  float mean;  // 0 but of layer norms
};

// Of a part whose elements from `first_of` to `end` the threads of this block hold; every thread gets them.
__device__ __forceinline__ Figures figures_of(const Step (&values)[vectors], int end, float* scratch) {
  auto add_up = [&](auto term) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
#pragma unroll
      for (int e = 0; e < step; ++e) {
        if (first_of(i) + e < end) sum += term(values[i][e]);
      }
    }
    return ac::block_sum<warps>(sum, scratch, threadIdx.x / ac::warp_size, threadIdx.x % ac::warp_size);
  };
  Figures figures{0.0f, 0.0f};
  if constexpr (layer) figures.mean = add_up([](float x) { return x; }) / static_cast<float>(end - static_cast<int>(blockIdx.x) * Plan::part);
  figures.squares = add_up([&](float x) { return (x - figures.mean) * (x - figures.mean); });
  return figures;
}

// Of a row, from those of its parts: number i of this thread's is part part_of(i), which may lie beyond the last one. `sum` adds up
// what the threads have that share the parts.
template <int Each, class PartOf, class Sum>
__device__ __forceinline__ ac::RowStatistics statistics_of(const Figures (&figures)[Each], PartOf part_of, Sum sum, float eps) {
  auto add_up = [&](auto term) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      const int count = end_of(part_of(i)) - part_of(i) * Plan::part;
      if (count > 0) total += term(figures[i], static_cast<float>(count));
    }
    return sum(total) * (1.0f / static_cast<float>(columns));
  };
  float mean = 0.0f;
  if constexpr (layer) mean = add_up([](const Figures& part, float count) { return part.mean * count; });
  const float square = add_up([&](const Figures& part, float count) {
    return part.squares + (layer ? (part.mean - mean) * (part.mean - mean) * count : 0.0f);
  });
  return ac::RowStatistics{mean, rsqrtf(square + eps)};
}

// What a block has of its part, as it is stored.
struct Part {
  Held<T> own[vectors], added[vectors], with0[vectors], with1[vectors];

  __device__ __forceinline__ void load(const T* x, const T* residual, int end, bool whole) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      own[i] = Held<T>::load(x, first_of(i), end, whole);
      if constexpr (Plan::has_residual) added[i] = Held<T>::load(residual, first_of(i), end, whole);
    }
  }

  __device__ __forceinline__ void load_others(const T* aux0, const T* aux1, int end, bool whole) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      if constexpr (Plan::has_aux0) with0[i] = Held<T>::load(aux0, first_of(i), end, whole);
      if constexpr (Plan::has_aux1) with1[i] = Held<T>::load(aux1, first_of(i), end, whole);
    }
  }

  // The elements, or where there is a residual the sums, which are written.
  __device__ __forceinline__ void unpack(Step (&values)[vectors], T* residual_out, int end, bool whole) const {
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      own[i].unpack(values[i]);
      if constexpr (Plan::has_residual) {
        add_rounded(values[i], added[i]);
        store_step(values[i], residual_out, first_of(i), end, whole);
      }
    }
  }

  __device__ __forceinline__ void write(Step (&values)[vectors], const Weights (&weights)[vectors], ac::RowStatistics statistics, T* out,
                                        int end, bool whole) const {
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      Step others[2];
      if constexpr (Plan::has_aux0) with0[i].unpack(others[0]);
      if constexpr (Plan::has_aux1) with1[i].unpack(others[1]);
      weights[i].normalize(values[i], statistics);
#pragma unroll
      for (int e = 0; e < step; ++e) {
        const float normal[1] = {values[i][e]};
        const float with[2] = {Plan::has_aux0 ? others[0][e] : 0.0f, Plan::has_aux1 ? others[1][e] : 0.0f};
        values[i][e] = Epilogue::apply(normal, with);
      }
      store_step(values[i], out, first_of(i), end, whole);
    }
  }
};

}  // namespace
