// Decode attention of one layer in one launch, tensor cores (staged_steps.cuh) over K and V that wait in shared memory: q/k RMS
// norm, RoPE, append of the new position, split-KV softmax with GQA packing, merge. The same operands, layouts and grid as
// attention.cu; fp16 and bf16, up to eight query heads per block: a KV head's, or one part of them (decode_attention.cuh).
//
// Each warp streams its own positions, 16 at a time, through Plan::stages stages by cp.async: it waits for its own copies only,
// and no barrier of the block is between two steps. Stage: K [16, D], then V [16, Dv], in 16-byte vectors whose places within a
// row are such that what is read or written at once lies in different banks (`place`). A thread holds one step in registers
// whatever is in flight, so the blocks of the kernels in front and behind fit beside this one on an SM, and their loads and its
// own overlap. Wins where a split has many positions: thousands of them in all.
//
// Plan::together: how many of its steps, in as many stages, a warp takes at once: one, or all that wait (path=whole). Alone on its
// scheduler a warp waits for the tensor cores, for its lanes and for shared memory, then once for all of them. Wins alone where stages hold
// all positions (0.4 to 0.8 us of 4.6 to 5.1 at 2,048, H200), less inside a chain, where its registers keep other blocks away.
#include "staged_steps.cuh"

namespace {

constexpr int stages = Plan::stages;
constexpr int tile = warps * step;  // positions per block and round
constexpr int turns = stages / together;  // of all stages; one is what a warp takes at once
constexpr int warp_vectors = stages * stage_vectors > output_vectors ? stages * stage_vectors : output_vectors;  // of a warp's memory
static_assert(stages % together == 0, "stages are taken all at once or not at all");

// The stages of one warp. Every call is made by whole warps. `stride`: from one step of the warp to its next one, in positions.
struct Stream {
  Vector* memory;  // of this warp
  T* keys;
  T* values;
  int lane;

  // Copies one of the matrices of the step that begins at `base`; rows that are not cached become zero.
  template <int Vectors, long long Row, bool Settled>
  __device__ __forceinline__ void copy(Vector* to, const T* from, int base, const ac::Span& span) const {
    constexpr int at_once = ac::warp_size / Vectors;  // rows
    if constexpr (ac::warp_size % Vectors == 0 && at_once <= step) {  // a lane has one vector of every row it copies
      const int first = lane / Vectors, vector = lane % Vectors;
      const T* source = from + (base + first) * Row + vector * Vector::size;
      copy_rows<Vectors, Row, Settled, 0>(to + place<Vectors>(first, vector), source, base + first, span);
    } else {
      constexpr int vectors = step * Vectors;
#pragma unroll
      for (int first = 0; first < vectors; first += ac::warp_size) {
        const int number = first + lane, position = number / Vectors, vector = number % Vectors;
        if (vectors % ac::warp_size != 0 && number >= vectors) continue;
        const T* source = from + (base + position) * Row + vector * Vector::size;
        ac::cp_async16_zero_fill_from<0, Settled>(to + place<Vectors>(position, vector), source, span.is_cached(base + position));
      }
    }
  }

  // Of every row of a lane from the one on that lies `Rows` behind its first: nothing but the row moves on, and what is exchanged in it.
  template <int Vectors, long long Row, bool Settled, int Rows>
  __device__ __forceinline__ void copy_rows(Vector* to, const T* from, int position, const ac::Span& span) const {
    ac::cp_async16_zero_fill_from<static_cast<int>(Rows * Row * sizeof(T)), Settled>(
        turned(to, exchange<Vectors>(Rows)) + Rows * Vectors, from, span.is_cached(position + Rows));
    constexpr int next = Rows + ac::warp_size / Vectors;
    if constexpr (next < step) copy_rows<Vectors, Row, Settled, next>(to, from, position, span);
  }

  // One group of copies, also where nothing is left to copy: the waits count groups. What of it lies behind the length becomes zero.
  template <bool Settled> __device__ __forceinline__ void fill(int turn, int base, int stride, const ac::Span& span) const {
    if (base < span.length) {
#pragma unroll
      for (int u = 0; u < together; ++u) {
        Vector* to = memory + (turn * together + u) * stage_vectors;
        copy<key_vectors, key_row, Settled>(to, keys, base + u * stride, span);
        copy<value_vectors, value_row, Settled>(to + step * key_vectors, values, base + u * stride, span);
      }
    }
    ac::cp_async_commit();
  }

  template <bool Settled> __device__ __forceinline__ void fill_all(int start, int stride, const ac::Span& span) const {
#pragma unroll
    for (int turn = 0; turn < turns; ++turn) fill<Settled>(turn, start + turn * together * stride, stride, span);
  }

  // The new position, from where it was prepared, into its place in a stage and, where this part of the heads does that, in the caches.
  __device__ __forceinline__ void take_new(Vector* stage, int offset, int position, bool appends, const Vector (&new_key)[key_vectors],
                                           const Vector (&new_value)[value_vectors]) const {
    for (int vector = lane; vector < key_vectors; vector += ac::warp_size) {
      stage[key_place(offset, vector)] = new_key[vector];
      if (appends) new_key[vector].store(keys + position * key_row + vector * Vector::size);
    }
    for (int vector = lane; vector < value_vectors; vector += ac::warp_size) {
      stage[value_place(offset, vector)] = new_value[vector];
      if (appends) new_value[vector].store(values + position * value_row + vector * Vector::size);
    }
    __syncwarp();
  }

  // Nothing is on its way any more.
  __device__ __forceinline__ void drain() const {
    ac::cp_async_wait<0>();
    __syncwarp();
  }
};

// The weighted sums of the warps, each in its own stages, which nothing reads or fills any more: shared memory of their own would keep
// blocks of the kernel in front from being on the SM as well.
struct StageOutputs {
  Vector* memory;
  __device__ __forceinline__ float* team(int number) const { return reinterpret_cast<float*>(memory + number * warp_vectors); }
  __device__ __forceinline__ float of(int warp, unsigned i) const { return team(warp)[output_place(i / value_dim, i % value_dim)]; }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads, together > 1)
attention_kernel(const Plan::T* q, const Plan::T* k, const Plan::T* v, const Plan::T* q_norm, const Plan::T* k_norm,
                 const Plan::T* cos, const Plan::T* sin, Plan::T* k_cache, Plan::T* v_cache, const long long* position,
                 const Plan::Sink* sinks, Plan::T* out, float* workspace, unsigned int* counters, int capacity,
                 float scale, float norm_eps, int window, float softcap) {
  __shared__ float2 warp_states[warps][group];
  __shared__ Vector queries[group][key_vectors];
  __shared__ Vector new_key[key_vectors];
  __shared__ Vector new_value[value_vectors];
  __shared__ bool last;
  __shared__ Parts parts;
  AC_DYNAMIC_SHARED(Vector, memory);

  const Operands operands{q, k, v, q_norm, k_norm, cos, sin, k_cache, v_cache, position, sinks, out, workspace, counters,
                          capacity, scale, norm_eps, window, softcap};
  if (Plan::pdl) ac::launch_dependents();
  const long long hint = Plan::early_kv ? ac::load_hint(position) : 0;  // first of all: where K and V are read depends on it
  parts.open();
  const int warp = threadIdx.x / ac::warp_size, lane = threadIdx.x % ac::warp_size;
  const int row = lane / 4, column = lane % 4;  // of a fragment
  const int split = blockIdx.x, splits = split_count(), stride = splits * tile;
  const int kv_head = blockIdx.y;
  const Share share{kv_head};

  NewHeads<false> heads;
  heads.fetch_weights(q_norm, k_norm);

  const Stream stream{memory + warp * warp_vectors, k_cache + kv_head * head_dim, v_cache + kv_head * value_dim, lane};
  const Fragments fragments(stream.memory, lane);
  const int attended = Plan::has_window ? window : 0;
  ac::Span span;
  auto start_of = [&](const ac::Span& of) { return of.first + split * tile + warp * step; };  // of this warp
  if constexpr (Plan::early_kv) {
    span = ac::span_of<tile, Plan::chunk>(hint, capacity, attended, splits);
    stream.fill_all<true>(start_of(span), stride, span);
  }
  parts.opened();
  ac::grid_dependency_wait();

  const long long new_position = ac::load_relaxed(position);
  heads.fetch(q, k, v, cos, sin, share, new_value);
  if (!Plan::early_kv || new_position != span.position) {
    if constexpr (Plan::early_kv) stream.drain();
    span = ac::span_of<tile, Plan::chunk>(new_position, capacity, attended, splits);
    if (split < span.active) stream.fill_all<false>(start_of(span), stride, span);
  }
  if (split >= span.active) {
    if constexpr (Plan::early_kv) stream.drain();
    return;
  }
  parts.expect(span.active);

  heads.finish(queries, new_key, new_value, norm_eps);
  Query query;
  read_query(queries, lane, query);
  const Scaling scaling(scale, softcap, share, column);
  Running running;
  running.clear();
  int turn = 0;
#pragma unroll 1
  for (int base = start_of(span); base < span.length; base += together * stride) {
    const int behind = turn * together * stage_vectors;
    ac::cp_async_wait<turns - 1>();
    __syncwarp();
#pragma unroll
    for (int u = 0; u < together; ++u) {
      const int offset = span.position - (base + u * stride);
      if (offset >= 0 && offset < step && span.position < capacity) {
        stream.take_new(stream.memory + behind + u * stage_vectors, offset, span.position, share.appends(), new_key, new_value);
      }
    }
    Scores scores;
#pragma unroll
    for (int u = 0; u < together; ++u) {
      multiply(query, fragments, behind + u * stage_vectors, scores[u]);
      scaling.apply(scores[u], base + u * stride + row - span.position);
    }
    running.weigh(scores, span.length, base == start_of(span), [&](int u, int i) { return base + u * stride + row + i / 2 * 8; });
#pragma unroll
    for (int u = 0; u < together; ++u) running.add(scores[u], fragments, behind + u * stage_vectors);
    __syncwarp();  // all lanes have read the stages
    stream.fill<false>(turn, base + stages * stride, stride, span);
    turn = turn + 1 == turns ? 0 : turn + 1;
  }
  const StageOutputs outputs{memory};
  running.store(outputs.team(warp), warp_states[warp], row, column);

  merge(operands, share, span.active, outputs, Buffers{warp_states, parts, &last});
}
