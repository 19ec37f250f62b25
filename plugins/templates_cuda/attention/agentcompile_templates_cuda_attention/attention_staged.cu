// Decode attention of one layer in one launch, tensor cores (tensor_steps.cuh) over K and V that wait in shared memory: q/k RMS
// norm, RoPE, append of the new position, split-KV softmax with GQA packing, merge. The same operands, layouts and grid as
// attention.cu; fp16 and bf16, up to eight query heads per block: a KV head's, or one part of them (decode_attention.cuh).
//
// Each warp streams its own positions, 16 at a time, through Plan::stages stages by cp.async: it waits for its own copies only,
// and no barrier of the block is between two steps. Stage: K [16, D], then V [16, Dv], in 16-byte vectors; where a row is a whole
// number of 128 bytes, vectors are exchanged within them (`place`) so that the lanes that read together read from different banks.
// A thread holds one step in registers whatever is in flight, so the blocks of the kernels in front and behind fit beside this
// one on an SM, and their loads and its own overlap. Wins where a split has many positions: thousands of them in all.
//
// Plan::holds_first: the first step of each warp waits in registers, besides those in the stages: one more in flight in as much shared
// memory. Wins by 2 to 3 % where a split has one round more than stages hold, which would wait behind q; slower elsewhere.
#include "tensor_steps.cuh"

namespace {

constexpr int stages = Plan::stages;
constexpr int tile = warps * step;  // positions per block and round
constexpr int stage_vectors = step * (KeyHead::head_vectors + ValueHead::head_vectors);

// Where a vector of a row of a stage lies. Lanes that read in one phase have positions that differ in `Bits` bits from the
// `First`-th on, and 8 / 2^Bits neighbouring vectors.
template <class Head, int First, int Bits> __device__ __forceinline__ int place(int position, int vector) {
  constexpr int each = 8 >> Bits;
  if constexpr (Head::head_vectors % 8 != 0) return position * Head::head_vectors + vector;
  return position * Head::head_vectors + (vector ^ (position >> First & ((1 << Bits) - 1)) * each);
}
__device__ __forceinline__ int key_place(int position, int vector) { return place<KeyHead, 0, 1>(position, vector); }
__device__ __forceinline__ int value_place(int position, int vector) {
  return step * KeyHead::head_vectors + place<ValueHead, 1, 2>(position, vector);
}

template <bool Value> struct Bool { static constexpr bool value = Value; };

// The stages of one warp. Every call is made by whole warps.
struct Stream {
  Vector* memory;  // of this warp
  const T* keys;
  const T* values;
  long long key_row;
  long long value_row;
  int lane;

  __device__ __forceinline__ Vector* stage(int number) const { return memory + number * stage_vectors; }

  // Copies one of `Head`'s matrices of the step that begins at `base`; rows that are not cached become zero.
  template <class Head, bool Settled, class Place>
  __device__ __forceinline__ void copy(Vector* to, const T* from, long long row, int base, const ac::Span& span, Place placed) const {
    constexpr int each = Head::head_vectors, at_once = ac::warp_size / each;  // rows
    if constexpr (ac::warp_size % each == 0 && at_once <= step) {  // a lane has one vector of every row it copies: nothing but the row moves on
      const int first = lane / each, vector = lane % each;
      const T* source = from + (base + first) * row + vector * Vector::size;
#pragma unroll
      for (int turn = 0; turn < step / at_once; ++turn) {
        const int position = first + turn * at_once;
        copy16<Settled>(to + placed(position, vector), source, span.is_cached(base + position));
        source += at_once * row;
      }
    } else {
      constexpr int vectors = step * each;
#pragma unroll
      for (int first = 0; first < vectors; first += ac::warp_size) {
        const int number = first + lane, position = number / each, vector = number % each;
        if (vectors % ac::warp_size != 0 && number >= vectors) continue;
        copy16<Settled>(to + placed(position, vector), from + (base + position) * row + vector * Vector::size, span.is_cached(base + position));
      }
    }
  }

  // Nothing is read where nothing is wanted, wherever the source points.
  template <bool Settled> static __device__ __forceinline__ void copy16(Vector* to, const T* source, bool wanted) {
    if constexpr (Settled) {
      ac::cp_async16_zero_fill_settled(to, source, wanted);
    } else {
      ac::cp_async16_zero_fill(to, source, wanted);
    }
  }

  // One group of copies, also where nothing is left to copy: the waits count groups.
  template <bool Settled> __device__ __forceinline__ void fill(int number, int base, const ac::Span& span) const {
    if (base < span.length) {
      copy<KeyHead, Settled>(stage(number), keys, key_row, base, span, key_place);
      copy<ValueHead, Settled>(stage(number), values, value_row, base, span, value_place);
    }
    ac::cp_async_commit();
  }

  template <bool Settled> __device__ __forceinline__ void fill_all(int start, int stride, const ac::Span& span) const {
#pragma unroll
    for (int number = 0; number < stages; ++number) fill<Settled>(number, start + number * stride, span);
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
  static_assert(group * value_dim * sizeof(float) <= stages * stage_vectors * sizeof(Vector), "a warp's outputs fit into its stages");
  __device__ __forceinline__ float* operator[](int warp) const { return reinterpret_cast<float*>(memory + warp * stages * stage_vectors); }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
attention_kernel(const Plan::T* q, const Plan::T* k, const Plan::T* v, const Plan::T* q_norm, const Plan::T* k_norm,
                 const Plan::T* cos, const Plan::T* sin, Plan::T* k_cache, Plan::T* v_cache, const long long* position,
                 const Plan::Sink* sinks, Plan::T* out, float* workspace, unsigned int* counters, int kv_heads, int capacity,
                 float scale, float norm_eps, int window, float softcap) {
  __shared__ float2 warp_states[warps][group];
  __shared__ Vector queries[group][KeyHead::head_vectors];
  __shared__ Vector new_key[KeyHead::head_vectors];
  __shared__ Vector new_value[ValueHead::head_vectors];
  __shared__ bool last;
  __shared__ Parts parts;
  AC_DYNAMIC_SHARED(Vector, memory);

  const Operands operands{q, k, v, q_norm, k_norm, cos, sin, k_cache, v_cache, position, sinks, out, workspace, counters,
                          kv_heads, capacity, scale, norm_eps, window, softcap};
  if (Plan::pdl) ac::launch_dependents();
  const long long hint = Plan::early_kv ? ac::load_hint(position) : 0;  // first of all: where K and V are read depends on it
  parts.open();
  const int warp = threadIdx.x / ac::warp_size, lane = threadIdx.x % ac::warp_size;
  const int row = lane / 4, column = lane % 4;
  const int split = blockIdx.x, splits = gridDim.x, stride = splits * tile;
  const int kv_head = blockIdx.y;
  const Share share{kv_head};

  NewHeads<false> heads;
  heads.fetch_weights(q_norm, k_norm);

  const Rows rows{k_cache + kv_head * head_dim, v_cache + kv_head * value_dim, static_cast<long long>(kv_heads) * head_dim,
                  static_cast<long long>(kv_heads) * value_dim, row, column};
  const Stream stream{memory + warp * stages * stage_vectors, rows.keys, rows.values, rows.key_row, rows.value_row, lane};
  const int attended = Plan::has_window ? window : 0;
  ac::Span span;
  auto start_of = [&](const ac::Span& of) { return of.first + split * tile + warp * step; };  // of this warp
  Keys keys;
  Values values;
  auto fetch = [&](auto settled) {
    constexpr bool is_settled = decltype(settled)::value;
    const int start = start_of(span);
    if constexpr (Plan::holds_first) {
      rows.load_keys<is_settled>(keys, start, span);
      rows.load_values<is_settled>(values, start, span);
    }
    stream.fill_all<is_settled>(start + (Plan::holds_first ? stride : 0), stride, span);
  };
  if constexpr (Plan::early_kv) {
    span = ac::span_of<tile, Plan::chunk>(hint, capacity, attended, splits);
    fetch(Bool<true>{});
  }
  parts.opened();
  ac::grid_dependency_wait();

  const long long new_position = ac::load_relaxed(position);
  heads.fetch(q, k, v, cos, sin, share, new_value);
  if (!Plan::early_kv || new_position != span.position) {
    if constexpr (Plan::early_kv) stream.drain();
    span = ac::span_of<tile, Plan::chunk>(new_position, capacity, attended, splits);
    if (split < span.active) fetch(Bool<false>{});
  }
  if (split >= span.active) {
    if constexpr (Plan::early_kv) stream.drain();
    return;
  }
  parts.expect(span.active);

  heads.finish(queries, new_key, new_value, norm_eps);
  const bool owner = share.appends() && (span.position - span.first) / tile % splits == split && span.position < capacity;
  if (owner && threadIdx.x < KeyHead::head_vectors) {  // append
    new_key[threadIdx.x].store(k_cache + kv_head * head_dim + span.position * stream.key_row + threadIdx.x * Vector::size);
  }
  if (owner && threadIdx.x < ValueHead::head_vectors) {
    new_value[threadIdx.x].store(v_cache + kv_head * value_dim + span.position * stream.value_row + threadIdx.x * Vector::size);
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
  int number = 0;  // of the stage
  bool held = Plan::holds_first;  // this step waits in registers
#pragma unroll 1
  for (int base = start_of(span); base < span.length; base += stride) {
    Vector* stage = stream.stage(number);
    if (held) {
      rows.take_new(keys, values, base, span, capacity, new_key, new_value);
    } else {
      ac::cp_async_wait<stages - 1>();
      __syncwarp();
      const int offset = span.position - base;
      if (offset >= 0 && offset < step && span.position < capacity) {  // the new position is copied from where it was prepared
        for (int vector = lane; vector < KeyHead::head_vectors; vector += ac::warp_size) stage[key_place(offset, vector)] = new_key[vector];
        for (int vector = lane; vector < ValueHead::head_vectors; vector += ac::warp_size) {
          stage[value_place(offset, vector)] = new_value[vector];
        }
        __syncwarp();
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < KeyHead::vectors; ++j) {
          keys[0][half][j] = Vector::zero();
          if (KeyHead::inside(column + 4 * j)) keys[0][half][j] = stage[key_place(half * 8 + row, column + 4 * j)];
        }
      }
    }
    Scores scores;
    multiply(query, keys, scores);
    scaling.apply(scores, base, span.position, column);
    running.weigh(scores, base, span.length, column);
    if (!held) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < ValueHead::vectors; ++j) {
          values[0][i][j] = Vector::zero();
          if (ValueHead::inside(row + 8 * j)) values[0][i][j] = stage[value_place(position_in_step(i, column), row + 8 * j)];
        }
      }
    }
    running.add(scores, values);
    if (held) {
      held = false;
      continue;
    }
    __syncwarp();  // all lanes have read the stage
    stream.fill<false>(number, base + stages * stride, span);
    number = number + 1 == stages ? 0 : number + 1;
  }
  StageOutputs outputs{memory};
  running.store(outputs[warp], warp_states[warp], row, column);

  merge(operands, share, span.active, outputs, Buffers{warp_states, parts, &last});
}
