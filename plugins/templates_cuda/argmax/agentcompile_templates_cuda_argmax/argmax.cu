// Greedy token: the first index of the maximum of the logits, NaN counting as the maximum, as torch.argmax does on the GPU.
//
// logits [n]; token [1]; ws_values, ws_indices [blocks]; counter [1], zero before and after. Each block scans its share with
// 16-byte loads; the last block to arrive reduces the blocks' results and writes the token. With Plan::advance it also moves
// the decode state on: ids[0] = token, history[position + 1] = token (its last element once it is full), position += 1, so
// that the next step can be replayed without the host.
// Wins wherever the step is captured in a graph; the head's own epilogue could absorb the scan, not the state update.
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>
#include <agentcompile/split.cuh>
#include "plan.cuh"

namespace {

using T = Plan::T;
using Vector = ac::Vec16<T>;
constexpr int warps = Plan::threads / ac::warp_size;

// Loses against every element: minus infinity, at an index behind all others.
__device__ __forceinline__ ac::ValueIndex nothing() {
  return ac::ValueIndex{__int_as_float(static_cast<int>(0xff800000u)), 0x7fffffff};
}

// The better of `best` and the vector that begins at logits[first].
__device__ __forceinline__ ac::ValueIndex scan_vector(const T* logits, int first, ac::ValueIndex best) {
  float values[Vector::size];
  Vector::load(logits + first).unpack(values);
#pragma unroll
  for (int e = 0; e < Vector::size; ++e) best = ac::first_maximum(best, ac::ValueIndex{values[e], first + e});
  return best;
}

__device__ __forceinline__ ac::ValueIndex scan(const T* logits, int n) {
  ac::ValueIndex best = nothing();
  const int thread = blockIdx.x * Plan::threads + threadIdx.x;
  const int threads = gridDim.x * Plan::threads;
  const int in_vectors = ac::is_aligned16(logits) ? n / Vector::size * Vector::size : 0;
#pragma unroll Plan::unroll
  for (int i = thread * Vector::size; i < in_vectors; i += threads * Vector::size) best = scan_vector(logits, i, best);
  for (int i = in_vectors + thread; i < n; i += threads) {
    best = ac::first_maximum(best, ac::ValueIndex{ac::to_float(logits[i]), i});
  }
  return best;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
argmax_kernel(const Plan::T* logits, long long* token, int n, float* ws_values, int* ws_indices, unsigned int* counter,
              long long* ids, long long* position, long long* history, int history_length) {
  __shared__ float values[warps];
  __shared__ int indices[warps];
  __shared__ bool last;
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const int warp = threadIdx.x / ac::warp_size;
  const int lane = threadIdx.x % ac::warp_size;

  ac::ValueIndex best = ac::block_first_maximum<warps>(scan(logits, n), values, indices, warp, lane);
  if (gridDim.x > 1) {
    if (threadIdx.x == 0) {
      ws_values[blockIdx.x] = best.value;
      ws_indices[blockIdx.x] = best.index;
    }
    if (!ac::arrive_last(counter, gridDim.x, &last)) return;
    best = nothing();
    for (int block = threadIdx.x; block < static_cast<int>(gridDim.x); block += Plan::threads) {
      const ac::ValueIndex other{ac::load_relaxed(&ws_values[block]), ac::load_relaxed(&ws_indices[block])};
      best = ac::first_maximum(best, other);
    }
    best = ac::block_first_maximum<warps>(best, values, indices, warp, lane);
  }
  if (threadIdx.x != 0) return;
  token[0] = best.index;
  if constexpr (Plan::advance) {
    const long long next = position[0] + 1;
    ids[0] = best.index;
    history[min(next, history_length - 1ll)] = best.index;
    __threadfence();  // whoever sees the new position sees all that came before it (ac::load_hint)
    position[0] = next;
  }
}
