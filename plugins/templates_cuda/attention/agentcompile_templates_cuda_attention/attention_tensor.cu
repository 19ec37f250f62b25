// Decode attention of one layer in one launch, tensor cores (tensor_steps.cuh): q/k RMS norm, RoPE, append of the new position,
// split-KV softmax with GQA packing, merge. The same operands, layouts and grid as attention.cu; fp16 and bf16, up to eight
// query heads per block: a KV head's, or one part of them (decode_attention.cuh).
//
// K and V go from memory to registers to tensor cores, without shared memory or shuffles.
// Wins from about 500 positions on and for groups of three and more query heads, where fp32 FMA costs more than the loads.
#include "tensor_steps.cuh"

namespace {

constexpr int tile = warps * step * unroll;  // positions per block and round

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
attention_kernel(const Plan::T* q, const Plan::T* k, const Plan::T* v, const Plan::T* q_norm, const Plan::T* k_norm,
                 const Plan::T* cos, const Plan::T* sin, Plan::T* k_cache, Plan::T* v_cache, const long long* position,
                 const Plan::Sink* sinks, Plan::T* out, float* workspace, unsigned int* counters, int capacity,
                 float scale, float norm_eps, int window, float softcap) {
  __shared__ __align__(16) float warp_outputs[warps][group * value_dim];
  __shared__ float2 warp_states[warps][group];
  __shared__ Vector queries[group][KeyHead::head_vectors];
  __shared__ Vector new_key[KeyHead::head_vectors];
  __shared__ Vector new_value[ValueHead::head_vectors];
  __shared__ bool last;
  __shared__ Parts parts;

  const Operands operands{q, k, v, q_norm, k_norm, cos, sin, k_cache, v_cache, position, sinks, out, workspace, counters,
                          capacity, scale, norm_eps, window, softcap};
  if (Plan::pdl) ac::launch_dependents();
  const long long hint = Plan::early_kv ? ac::load_hint(position) : 0;  // first of all: where K and V are read depends on it
  parts.open();
  const int warp = threadIdx.x / ac::warp_size;
  const int row = threadIdx.x % ac::warp_size / 4;
  const int column = threadIdx.x % 4;
  const int split = blockIdx.x;
  const int splits = split_count();
  const int kv_head = blockIdx.y;
  const Share share{kv_head};

  NewHeads<true> heads;
  heads.fetch_weights(q_norm, k_norm);

  T* key_base = k_cache + kv_head * head_dim;
  T* value_base = v_cache + kv_head * value_dim;
  const int attended = Plan::has_window ? window : 0;
  ac::Span span;
  Keys keys;
  Values values;
  const Rows rows{key_base, value_base, row, column};
  auto start_of = [&](const ac::Span& of) { return of.first + split * tile + warp * step; };  // of this warp

  if constexpr (Plan::early_kv) {
    span = ac::span_of<tile, Plan::chunk>(hint, capacity, attended, splits);
    rows.load_keys<true>(keys, start_of(span), span);
    rows.load_values<true>(values, start_of(span), span);
  }
  parts.opened();
  ac::grid_dependency_wait();

  const long long new_position = ac::load_relaxed(position);
  heads.fetch(q, k, v, cos, sin, share, new_value);
  if (!Plan::early_kv || new_position != span.position) {
    span = ac::span_of<tile, Plan::chunk>(new_position, capacity, attended, splits);
    if (split < span.active) {
      rows.load_keys<false>(keys, start_of(span), span);
      rows.load_values<false>(values, start_of(span), span);
    }
  }
  if (split >= span.active) {
    heads.drain();
    return;
  }
  parts.expect(span.active);
  const int start = start_of(span);
  const int stride = splits * tile;

  heads.finish(queries, new_key, new_value, norm_eps);
  const bool owner = share.appends() && (span.position - span.first) / tile % splits == split && span.position < capacity;
  if (owner && threadIdx.x < KeyHead::head_vectors) {  // append
    new_key[threadIdx.x].store(key_base + span.position * key_row + threadIdx.x * Vector::size);
  }
  if (owner && threadIdx.x < ValueHead::head_vectors) {
    new_value[threadIdx.x].store(value_base + span.position * value_row + threadIdx.x * Vector::size);
  }
  KeyHead::Packed query;
#pragma unroll
  for (int j = 0; j < KeyHead::vectors; ++j) {
    query[j] = Vector::zero();
    if (row < group && KeyHead::inside(column + 4 * j)) query[j] = queries[row][column + 4 * j];
  }

  const Scaling scaling(scale, softcap, share.first_head() + row, row < group);
  Running running;
  running.clear();
  for (int base = start; base - warp * step < span.length; base += stride) {
    rows.take_new(keys, values, base, span, capacity, new_key, new_value);
    Scores scores;
    multiply(query, keys, scores);
    const bool more = base - warp * step + stride < span.length;
    if (more) rows.load_keys<false>(keys, base + stride, span);
    scaling.apply(scores, base, span.position, column);
    running.weigh(scores, base, span.length, column);
    running.add(scores, values);
    if (more) rows.load_values<false>(values, base + stride, span);
  }
  running.store(warp_outputs[warp], warp_states[warp], row, column);

  merge(operands, share, span.active, WarpOutputs{warp_outputs}, Buffers{warp_states, parts, &last});
}
