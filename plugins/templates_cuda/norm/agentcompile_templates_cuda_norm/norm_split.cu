// RMS or layer norm of long rows, each dealt out to several blocks: operands, roundings, residual and Epilogue as norm.cu.
//
// Two launches over the grid (Plan::splits, rows). A part is Plan::part neighbouring elements of a row (the last one has fewer), which
// the threads of its block hold. The first launch writes the residual sum where there is one, and leaves of every part what its elements
// add up to: {squares}, or {squares, mean} of layer norms, in ws_parts [rows, splits]. In the second every block adds up the parts of
// its row in a fixed order, reads its own part again, mostly from L2, and writes. It has its weights before the first launch is done.
// Wins where a row does not fit into a block, or rows are fewer than SMs and each is long enough to pay for the second launch.
#include "plan.cuh"
#include "norm_part.cuh"

namespace {

constexpr int splits = Plan::splits;
constexpr int figures_held = layer ? 2 : 1;  // of a part
constexpr int sharing = splits <= 8 * ac::warp_size ? 1 : warps;  // warps that add up the parts together; else each for itself
constexpr int shared_by = sharing * ac::warp_size;
constexpr int each_adds = (splits + shared_by - 1) / shared_by;

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
norm_parts_kernel(const Plan::T* x, const Plan::T* residual, Plan::T* residual_out, float* ws_parts) {
  __shared__ float scratch[warps];
  if (Plan::pdl) ac::launch_dependents();
  ac::grid_dependency_wait();
  const long long offset = static_cast<long long>(blockIdx.y) * columns;
  const bool whole = columns % step == 0 && all_aligned(x, residual, residual_out);
  const int end = end_of(blockIdx.x);
  Part part;
  part.load(x + offset, residual + offset, end, whole);
  Step values[vectors];
  part.unpack(values, residual_out + offset, end, whole);
  const Figures figures = figures_of(values, end, scratch);
  if (threadIdx.x == 0) {
    float* const own = ws_parts + (static_cast<long long>(blockIdx.y) * splits + blockIdx.x) * figures_held;
    own[0] = figures.squares;
    if constexpr (layer) own[1] = figures.mean;
  }
}

// `x`: what is normalized, the sum where there is a residual.
extern "C" __global__ void __launch_bounds__(Plan::threads)
norm_write_kernel(const Plan::T* x, const Plan::W* weight, const Plan::W* bias, const Plan::T* aux0, const Plan::T* aux1,
                  const float* ws_parts, Plan::T* out, float eps, int groups, int span) {
  __shared__ float scratch[warps];
  if (Plan::pdl) ac::launch_dependents();
  const long long offset = static_cast<long long>(blockIdx.y) * columns;
  const bool whole = columns % step == 0 && all_aligned(x, weight, bias, aux0, aux1, out);
  const int end = end_of(blockIdx.x);
  const int channel = first_channel(blockIdx.y, groups, columns, span);
  Weights weights[vectors];
#pragma unroll
  for (int i = 0; i < vectors; ++i) weights[i].load(weight, bias, first_of(i), end, whole, channel, span);
  ac::grid_dependency_wait();
  Part part;
#pragma unroll
  for (int i = 0; i < vectors; ++i) part.own[i] = Held<T>::load(x + offset, first_of(i), end, whole);
  part.load_others(aux0 + offset, aux1 + offset, end, whole);

  const float* const parts = ws_parts + static_cast<long long>(blockIdx.y) * splits * figures_held;
  auto part_of = [](int i) { return i * shared_by + static_cast<int>(threadIdx.x) % shared_by; };
  Figures figures[each_adds];
#pragma unroll
  for (int i = 0; i < each_adds; ++i) {
    const bool exists = part_of(i) < splits;
    figures[i].squares = exists ? ac::load_relaxed(&parts[part_of(i) * figures_held]) : 0.0f;
    figures[i].mean = layer && exists ? ac::load_relaxed(&parts[part_of(i) * figures_held + layer]) : 0.0f;
  }
  auto sum = [&](float own) { return ac::block_sum<sharing>(own, scratch, threadIdx.x / ac::warp_size, threadIdx.x % ac::warp_size); };
  const ac::RowStatistics statistics = statistics_of(figures, part_of, sum, eps);
  Step values[vectors];
#pragma unroll
  for (int i = 0; i < vectors; ++i) part.own[i].unpack(values[i]);
  part.write(values, weights, statistics, out + offset, end, whole);
}
