// Row operations that kernels share: the norms, in the framework's roundings. (RoPE and others are added below.)
//
// Let T be the tensors' type, r = rsqrt(mean(x^2) + eps) in fp32, everything else in fp32 until "T(...)" rounds it.
//   rms           T(w * T(x r))               HuggingFace Llama, Qwen, Mistral
//   rms_one_plus  T(x r (1 + w))              HuggingFace Gemma
//   layer         T((x - mean) r w + b)       torch LayerNorm, r = rsqrt(var + eps); w and b may be absent
#pragma once
#include <agentcompile/dtype.cuh>
#include <agentcompile/reduce.cuh>

namespace ac {

enum Norm : int { norm_none = 0, norm_rms = 1, norm_rms_one_plus = 2, norm_layer = 3 };

// What a norm needs to know about its row; mean is 0 for the RMS norms.
struct RowStatistics {
  float mean;
  float inverse;
};

// One element of a normalized row, rounded as above; the result is a value of T held in a float. `scale` is the norm
// weight (1 where there is none), `shift` the bias (0 where there is none; used by `layer` only).
template <int Kind, class T>
__device__ __forceinline__ float normalize(float x, RowStatistics row, float scale, float shift) {
  if constexpr (Kind == norm_rms) {
    return round_to<T>(scale * round_to<T>(x * row.inverse));
  } else if constexpr (Kind == norm_rms_one_plus) {
    return round_to<T>(x * row.inverse * (1.0f + scale));
  } else if constexpr (Kind == norm_layer) {
    return round_to<T>((x - row.mean) * row.inverse * scale + shift);
  } else {
    return x;
  }
}

// 1 / sqrt(mean + eps), correctly rounded in both steps: rsqrtf's approximation would be the largest error of fp32 models.
__device__ __forceinline__ float inverse_root(float mean, float eps) { return 1.0f / sqrtf(mean + eps); }

// Statistics of a row of `columns` elements spread over `Warps` warps. `each(f)` calls f(x) for every element that this
// thread holds, and is called once (RMS) or twice (layer: the mean first, then squared deviations, since
// mean(x^2) - mean^2 cancels where the mean is large). `scratch`: Warps floats in shared memory.
template <int Kind, int Warps, class Each, class Barrier = BlockBarrier>
__device__ __forceinline__ RowStatistics row_statistics(Each each, int columns, float eps, float* scratch, int warp,
                                                        int lane, Barrier barrier = {}) {
  const float count = static_cast<float>(columns);
  RowStatistics row{0.0f, 1.0f};
  if constexpr (Kind == norm_none) return row;
  if constexpr (Kind == norm_layer) {
    float sum = 0.0f;
    each([&](float x) { sum += x; });
    row.mean = block_sum<Warps>(sum, scratch, warp, lane, barrier) / count;
  }
  float squares = 0.0f;
  each([&](float x) { squares = fmaf(x - row.mean, x - row.mean, squares); });
  row.inverse = inverse_root(block_sum<Warps>(squares, scratch, warp, lane, barrier) / count, eps);
  return row;
}

}  // namespace ac
