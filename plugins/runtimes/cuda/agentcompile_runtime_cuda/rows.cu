// Pointwise work of prompt chunks in one pass each, in the framework's roundings: what it does in 4 to 8 launches.
//
// All tensors are of type T, their rows begin at multiples of 16 bytes and have a multiple of Vector::size elements.
//   rms_rows_warp, rms_rows_block   x, out [rows, columns]; one warp or the whole block per row; `kind` as in row.cuh. The row is
//                                   read twice, the second time from L1. Blocks win from about a thousand columns on.
//   rope_rows                       x [T, H, D] with strides, out [T, H, D] dense, cos and sin [T, R]; the first R channels turn
//   silu_product                    out = silu(gate) * up, `count` elements
//   merge_rows                      attention over several ranges of keys, each [T, H, D] dense with its logsumexp [H, T] in fp32,
//                                   as attention over all of them; absent parts are null
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>
#include <agentcompile/reduce.cuh>
#include <agentcompile/row.cuh>
#include "plan.cuh"

namespace {

using T = Plan::T;
using Vector = ac::Vec16<T>;
constexpr int size = Vector::size;
constexpr int warps = Plan::threads / ac::warp_size;

template <int Kind>
__device__ __forceinline__ void write_row(const T* x, const T* weight, T* out, int columns, float inverse, int first, int step) {
  const ac::RowStatistics row{0.0f, inverse};
  for (; first < columns; first += step) {
    float values[size], scales[size];
    Vector::load(x + first).unpack(values);
    if (weight != nullptr) Vector::load(weight + first).unpack(scales);
#pragma unroll
    for (int e = 0; e < size; ++e) values[e] = ac::normalize<Kind, T>(values[e], row, weight != nullptr ? scales[e] : 1.0f, 0.0f);
    Vector::pack(values).store(out + first);
  }
}

template <int Warps>
__device__ __forceinline__ void rms_row(const T* x, const T* weight, T* out, int columns, float eps, int kind, int thread,
                                        float* scratch) {
  const int first = thread * size;
  constexpr int step = Warps * ac::warp_size * size;
  auto each = [&](auto visit) {
    for (int at = first; at < columns; at += step) {
      float values[size];
      Vector::load(x + at).unpack(values);
#pragma unroll
      for (int e = 0; e < size; ++e) visit(values[e]);
    }
  };
  const int warp = thread / ac::warp_size, lane = thread % ac::warp_size;
  const float inverse = ac::row_statistics<ac::norm_rms, Warps>(each, columns, eps, scratch, warp, lane).inverse;
  if (kind == ac::norm_rms_one_plus) {
    write_row<ac::norm_rms_one_plus>(x, weight, out, columns, inverse, first, step);
  } else if (kind == ac::norm_rms_once) {
    write_row<ac::norm_rms_once>(x, weight, out, columns, inverse, first, step);
  } else {
    write_row<ac::norm_rms>(x, weight, out, columns, inverse, first, step);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
rms_rows_warp(const Plan::T* x, const Plan::T* weight, Plan::T* out, int rows, int columns, float eps, int kind) {
  const long long row = static_cast<long long>(blockIdx.x) * warps + threadIdx.x / ac::warp_size;
  if (row >= rows) return;
  const long long offset = row * columns;
  rms_row<1>(x + offset, weight, out + offset, columns, eps, kind, threadIdx.x % ac::warp_size, nullptr);
}

extern "C" __global__ void __launch_bounds__(Plan::threads)
rms_rows_block(const Plan::T* x, const Plan::T* weight, Plan::T* out, int rows, int columns, float eps, int kind) {
  __shared__ float scratch[warps];
  const long long offset = static_cast<long long>(blockIdx.x) * columns;
  rms_row<warps>(x + offset, weight, out + offset, columns, eps, kind, threadIdx.x, scratch);
}

// A thread turns one vector of channels and that half of the rotary part away from it, or copies one vector of the rest.
extern "C" __global__ void __launch_bounds__(Plan::threads)
rope_rows(const Plan::T* x, const Plan::T* cos, const Plan::T* sin, Plan::T* out, int tokens, int heads, int dim, int rotary,
          long long token_stride, long long head_stride) {
  const int half = rotary / 2;
  const int vectors = (half + dim - rotary) / size;
  const long long item = static_cast<long long>(blockIdx.x) * Plan::threads + threadIdx.x;
  const long long row = item / vectors;
  if (row >= static_cast<long long>(tokens) * heads) return;
  const int channel = static_cast<int>(item % vectors) * size;
  const int token = static_cast<int>(row / heads), head = static_cast<int>(row % heads);
  const T* from = x + token * token_stride + head * head_stride;
  T* to = out + row * dim;
  if (channel >= half) {
    const int rest = rotary + channel - half;
    Vector::load(from + rest).store(to + rest);
    return;
  }
  const T* cosines = cos + static_cast<long long>(token) * rotary;
  const T* sines = sin + static_cast<long long>(token) * rotary;
  float low[size], high[size], c[size], s[size], turned[size];
  Vector::load(from + channel).unpack(low);
  Vector::load(from + channel + half).unpack(high);
  Vector::load(cosines + channel).unpack(c);
  Vector::load(sines + channel).unpack(s);
#pragma unroll
  for (int e = 0; e < size; ++e) turned[e] = ac::round_to<T>(low[e] * c[e]) + ac::round_to<T>(-high[e] * s[e]);
  Vector::pack(turned).store(to + channel);
  Vector::load(cosines + channel + half).unpack(c);
  Vector::load(sines + channel + half).unpack(s);
#pragma unroll
  for (int e = 0; e < size; ++e) turned[e] = ac::round_to<T>(high[e] * c[e]) + ac::round_to<T>(low[e] * s[e]);
  Vector::pack(turned).store(to + channel + half);
}

extern "C" __global__ void __launch_bounds__(Plan::threads)
silu_product(const Plan::T* gate, const Plan::T* up, Plan::T* out, long long count) {
  const long long first = (static_cast<long long>(blockIdx.x) * Plan::threads + threadIdx.x) * size;
  if (first >= count) return;
  float values[size], factors[size];
  Vector::load(gate + first).unpack(values);
  Vector::load(up + first).unpack(factors);
#pragma unroll
  for (int e = 0; e < size; ++e) values[e] = ac::round_to<T>(ac::silu(values[e])) * factors[e];
  Vector::pack(values).store(out + first);
}

extern "C" __global__ void __launch_bounds__(Plan::threads)
merge_rows(const Plan::T* part0, const Plan::T* part1, const Plan::T* part2, const Plan::T* part3, const Plan::T* part4,
           const float* sum0, const float* sum1, const float* sum2, const float* sum3, const float* sum4, Plan::T* out,
           int tokens, int heads, int dim) {
  constexpr int most = 5;
  const int vectors = dim / size;
  const long long item = static_cast<long long>(blockIdx.x) * Plan::threads + threadIdx.x;
  const long long row = item / vectors;
  if (row >= static_cast<long long>(tokens) * heads) return;
  const long long place = row * dim + item % vectors * size;
  const long long of_sum = row % heads * tokens + row / heads;
  const T* parts[most] = {part0, part1, part2, part3, part4};
  const float* sums[most] = {sum0, sum1, sum2, sum3, sum4};
  float logs[most], highest = -3.4e38f, total = 0.0f;
#pragma unroll
  for (int i = 0; i < most; ++i) {
    logs[i] = parts[i] != nullptr ? sums[i][of_sum] : -3.4e38f;
    highest = fmaxf(highest, logs[i]);
  }
  float merged[size] = {};
#pragma unroll
  for (int i = 0; i < most; ++i) {
    if (parts[i] == nullptr) continue;
    const float weight = expf(logs[i] - highest);
    float values[size];
    Vector::load(parts[i] + place).unpack(values);
    total += weight;
#pragma unroll
    for (int e = 0; e < size; ++e) merged[e] = fmaf(weight, values[e], merged[e]);
  }
#pragma unroll
  for (int e = 0; e < size; ++e) merged[e] /= total;
  Vector::pack(merged).store(out + place);
}
