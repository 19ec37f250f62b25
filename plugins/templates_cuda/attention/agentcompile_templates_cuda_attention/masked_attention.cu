// Attention of all rows at once: out[b, h, i] = sum_j softmax_j(q[b, h, i] . k[b, g, j] * scale + mask[b, h, i, j]) v[b, g, j].
//
// q, k, v, mask and out lie in any steps (elements); channels of a head are neighbours. A block makes Plan::warps *
// Plan::rows_per_warp rows of one head (blockIdx.y = b * heads + h) and walks along the keys, 32 at a time: lane j scores key j of
// the tile for each row of its warp; maximum and sum are kept beside the row's channels, which the lanes share.
// A row that sees nothing is zero, as torch's is. Everything is added in float32.
// Wins where rows are few and launches count: prompts of a chunk, encoders of short texts, patches of small images.
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>
#include "plan.cuh"

namespace {

using T = Plan::T;
constexpr int tile = ac::warp_size;  // keys: one for each lane
constexpr int threads = Plan::warps * ac::warp_size;
constexpr int rows_per_block = Plan::warps * Plan::rows_per_warp;
constexpr int width = Plan::head_dim;
constexpr int wide = Plan::value_dim;
constexpr int shares = (wide + ac::warp_size - 1) / ac::warp_size;  // channels of a row that a lane adds up
constexpr float lowest = -3.402823466e38f;
enum Mask : int { none = 0, seen = 1, added = 2 };

__device__ __forceinline__ float minus_infinity() { return __int_as_float(static_cast<int>(0xff800000u)); }

// The score of one row and key as the mask leaves it.
template <class M> __device__ __forceinline__ float masked(float score, const M* mask, long long place) {
  if constexpr (Plan::mask == seen) return mask[place] ? score : minus_infinity();
  if constexpr (Plan::mask == added) return score + ac::to_float(mask[place]);
  return score;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::warps * 32)
masked_attention_kernel(const Plan::T* q, const Plan::T* k, const Plan::T* v, const Plan::M* mask, Plan::T* out, int heads, int group,
                        int rows, int keys, float scale, long long q_offset, long long q_batch, long long q_head, long long q_row,
                        long long k_offset, long long k_batch, long long k_head, long long k_row, long long v_offset,
                        long long v_batch, long long v_head, long long v_row, long long mask_offset, long long mask_batch,
                        long long mask_head, long long mask_row, long long mask_column, long long out_batch, long long out_head,
                        long long out_row) {
  __shared__ float queries[rows_per_block][width];
  __shared__ float held_keys[tile][width + 1];
  __shared__ float held_values[Plan::hold_values ? tile : 1][wide];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const int warp = threadIdx.x / ac::warp_size;
  const int lane = threadIdx.x % ac::warp_size;
  const int batch = blockIdx.y / heads;
  const int head = blockIdx.y % heads;
  const int first = blockIdx.x * rows_per_block;
  const T* const own_q = q + q_offset + batch * q_batch + head * q_head;
  const T* const own_k = k + k_offset + batch * k_batch + (head / group) * k_head;
  const T* const own_v = v + v_offset + batch * v_batch + (head / group) * v_head;
  const long long own_mask = mask_offset + batch * mask_batch + head * mask_head;

  for (int i = threadIdx.x; i < rows_per_block * width; i += threads) {
    const int row = first + i / width;
    queries[i / width][i % width] = row < rows ? ac::to_float(own_q[row * q_row + i % width]) : 0.0f;
  }
  float totals[Plan::rows_per_warp][shares] = {};
  float maxima[Plan::rows_per_warp];
  float sums[Plan::rows_per_warp];
#pragma unroll
  for (int r = 0; r < Plan::rows_per_warp; ++r) {
    maxima[r] = lowest;
    sums[r] = 0.0f;
  }
  const int end = Plan::causal ? first + rows_per_block : keys;  // what lies beyond keys is hidden like what lies ahead
  for (int start = 0; start < end; start += tile) {
    __syncthreads();
    for (int i = threadIdx.x; i < tile * width; i += threads) {
      const int key = start + i / width;
      held_keys[i / width][i % width] = key < keys ? ac::to_float(own_k[key * k_row + i % width]) : 0.0f;
    }
    if constexpr (Plan::hold_values) {
      for (int i = threadIdx.x; i < tile * wide; i += threads) {
        const int key = start + i / wide;
        held_values[i / wide][i % wide] = key < keys ? ac::to_float(own_v[key * v_row + i % wide]) : 0.0f;
      }
    }
    __syncthreads();
    const int key = start + lane;
    const int here = min(tile, keys - start);
#pragma unroll
    for (int r = 0; r < Plan::rows_per_warp; ++r) {
      const int place = warp * Plan::rows_per_warp + r;
      const int row = first + place;
      float parts[4] = {};
#pragma unroll
      for (int d = 0; d < width; ++d) parts[d % 4] += queries[place][d] * held_keys[lane][d];
      float score = (parts[0] + parts[1] + (parts[2] + parts[3])) * scale;
      if (row < rows && key < keys && (!Plan::causal || key <= row)) {
        score = masked(score, mask, own_mask + row * mask_row + key * mask_column);
      } else {
        score = minus_infinity();
      }
      const float larger = fmaxf(maxima[r], ac::warp_max(score));
      const float shrunk = expf(maxima[r] - larger);
      const float weight = expf(score - larger);
      maxima[r] = larger;
      sums[r] = sums[r] * shrunk + ac::warp_sum(weight);
#pragma unroll
      for (int s = 0; s < shares; ++s) totals[r][s] *= shrunk;
      for (int j = 0; j < here; ++j) {
        const float share = __shfl_sync(ac::full_warp, weight, j);
#pragma unroll
        for (int s = 0; s < shares; ++s) {
          const int d = s * ac::warp_size + lane;
          if (d >= wide) continue;
          float value;
          if constexpr (Plan::hold_values) {
            value = held_values[j][d];
          } else {
            value = ac::to_float(own_v[(start + j) * v_row + d]);
          }
          totals[r][s] += share * value;
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < Plan::rows_per_warp; ++r) {
    const int row = first + warp * Plan::rows_per_warp + r;
    if (row >= rows) continue;
    T* const own_out = out + batch * out_batch + head * out_head + row * out_row;
#pragma unroll
    for (int s = 0; s < shares; ++s) {
      const int d = s * ac::warp_size + lane;
      if (d < wide) own_out[d] = ac::from_float<T>(sums[r] == 0.0f ? 0.0f : totals[r][s] / sums[r]);
    }
  }
}
