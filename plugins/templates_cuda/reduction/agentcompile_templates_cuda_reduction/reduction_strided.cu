// Reduction along axes before the last: out[o, i] over c of x[o, c, i], or the first place of an extreme, or both.
//
// x [outer, columns, inner] is the plan's expression over in0, in1, in2; out, indices [outer, inner]. A block owns 32 * Plan::step
// neighbouring i of one o: Plan::step per lane, so that a warp's loads lie side by side, and the axis, or one of `splits` parts
// of it, dealt out to Plan::warps warps, whose states meet in shared memory. Parts are merged by a second launch.
// Wins over a transposed copy always; parts where the blocks are fewer than SMs.
#include "plan.cuh"
#include "finish.cuh"

namespace {

constexpr int group = State::words == 1 ? 64 : 16;  // elements of a lane that are taken together before they join the rest

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::warps * 32)
reduction_strided_kernel(const Plan::A0* in0, const Plan::A1* in1, const Plan::A2* in2, Plan::T* out, long long* indices, float* ws_states,
                         int columns, int part, long long inner, int tiles, float scale, long long period0, long long period1,
                         long long period2) {
  __shared__ State states[Plan::warps][ac::warp_size * step];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const int warp = threadIdx.x / ac::warp_size;
  const int lane = threadIdx.x % ac::warp_size;
  const Elements elements = elements_of(in0, in1, in2, period0, period1, period2);
  const bool vectors = inner % step == 0 && elements.in_vectors<step>();
  const long long outer = blockIdx.x / tiles;
  const long long tile = static_cast<long long>(blockIdx.x % tiles) * ac::warp_size * step;
  const int begin = blockIdx.y * part;
  const int end = min(static_cast<long long>(begin) + part, static_cast<long long>(columns));
  State own[step];
#pragma unroll
  for (int e = 0; e < step; ++e) own[e] = State::nothing();
  // In groups, since what is added up one by one errs by the root of how many there are.
  for (int start = begin + warp; start < end; start += group * Plan::warps) {
    State some[step];
#pragma unroll
    for (int e = 0; e < step; ++e) some[e] = State::nothing();
    const int stop = min(start + group * Plan::warps, end);
#pragma unroll Plan::unroll
    for (int c = start; c < stop; c += Plan::warps) {
      const long long line = (outer * columns + c) * inner;
      float values[step];
      elements.load_below(line + tile + lane * step, line + inner, 0.0f, vectors, values);
#pragma unroll
      for (int e = 0; e < step; ++e) {
        const float value[1] = {values[e]};
        some[e].add(value, c, 1);
      }
    }
#pragma unroll
    for (int e = 0; e < step; ++e) own[e].merge(some[e]);
  }
#pragma unroll
  for (int e = 0; e < step; ++e) states[warp][e * ac::warp_size + lane] = own[e];
  __syncthreads();
  for (int i = threadIdx.x; i < ac::warp_size * step; i += Plan::warps * ac::warp_size) {
    const long long column = tile + i % ac::warp_size * step + i / ac::warp_size;
    if (column >= inner) continue;
    State state = states[0][i];
#pragma unroll
    for (int other = 1; other < Plan::warps; ++other) state.merge(states[other][i]);
    const long long place = outer * inner + column;
    if constexpr (Plan::split) {
      keep(state, ws_states, blockIdx.y * static_cast<long long>(gridDim.x / tiles) * inner + place);
    } else {
      write(state, scale, out, indices, place);
    }
  }
}

extern "C" __global__ void __launch_bounds__(128)
reduction_finish_kernel(const float* ws_states, Plan::T* out, long long* indices, long long results, int splits, float scale) {
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  finish(ws_states, out, indices, results, splits, scale);
}
