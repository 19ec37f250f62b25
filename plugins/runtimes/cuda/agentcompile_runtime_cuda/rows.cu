// Pointwise work of prompt chunks in one pass each, in the framework's roundings: what it does in 4 to 8 launches.
//
// All tensors are of type T, their rows begin at multiples of 16 bytes and have a multiple of Vector::size elements.
//   norm_rows_warp, norm_rows_block x, out [rows, columns]; one warp or the whole block per row; `kind` as in row.cuh; weight and
//                                   bias may be null. The row is read twice (for layer norms three times), from the second time on
//                                   from L1. Blocks win from about a thousand columns on.
//   rope_rows                       x [T, H, D] with strides, out [T, H, D] dense, cos and sin [T, R]; the first R channels turn, each
//                                   with that R / 2 away or, if `interleaved`, with its neighbour
//   add_norm_rows                   total = left + right and out = its norm, [rows, columns]; one block per row, which stays in
//                                   registers up to 4096 columns: a third less traffic than a sum and a norm behind each other
//   place_heads                     queries, keys and values of a chunk, each [T, H, D] with strides: normed and turned where their
//                                   bit is set, and written to other strides, those of moved ones `at[0]` tokens further on. `lanes`
//                                   (a power of two) threads per head of `each` tokens, each with two vectors, which are turned into
//                                   each other, or each within itself if `style` says interleaved. One launch for two norms, two
//                                   rotations and three copies, and no row lies in memory in between
//   gate_rows                       out = activation(gate) * up, dense rows of `columns`; those of gate and up may be slices of wider
//                                   ones. activation.cuh knows the activations
//   weigh_rows, weigh_rows_wide     out[t] = sum over s of x[t, s] weights[t, s], rows of `columns`, `slots` of them a token; the wide one
//                                   has weights and results in fp32, the other one rounds each product as the framework does
//   merge_rows                      attention over several ranges of keys, each [T, H, D] dense with its logsumexp [H, T] in fp32,
//                                   as attention over all of them; absent parts are null
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>
#include <agentcompile/row.cuh>
#include "plan.cuh"

namespace {

using T = Plan::T;
using Vector = ac::Vec16<T>;
constexpr int size = Vector::size;
constexpr int warps = Plan::threads / ac::warp_size;

// At the begin of each kernel: the next one of the chain may come as far as this, and what the one before wrote is there.
__device__ __forceinline__ void wait_in_chain() {
  ac::launch_dependents();
  ac::grid_dependency_wait();
}

// The number of this block, counted from the end: what a product wrote last is still in L2 and is read first, and what the next
// product reads first is written last.
__device__ __forceinline__ int block_from_the_end() { return static_cast<int>(gridDim.x - 1 - blockIdx.x); }

// Eight elements of a row, normed; `weight` and `bias` are null or point to theirs.
__device__ __forceinline__ void norm_vector(float (&values)[size], const T* weight, const T* bias, ac::RowStatistics row, int kind) {
  float scales[size], shifts[size];
#pragma unroll
  for (int e = 0; e < size; ++e) {
    scales[e] = 1.0f;
    shifts[e] = 0.0f;
  }
  if (weight != nullptr) Vector::load(weight).unpack(scales);
  if (bias != nullptr) Vector::load(bias).unpack(shifts);
#pragma unroll
  for (int e = 0; e < size; ++e) {
    if (kind == ac::norm_rms_one_plus) {
      values[e] = ac::normalize<ac::norm_rms_one_plus, T>(values[e], row, scales[e], shifts[e]);
    } else if (kind == ac::norm_rms_once) {
      values[e] = ac::normalize<ac::norm_rms_once, T>(values[e], row, scales[e], shifts[e]);
    } else if (kind == ac::norm_layer) {
      values[e] = ac::normalize<ac::norm_layer, T>(values[e], row, scales[e], shifts[e]);
    } else {
      values[e] = ac::normalize<ac::norm_rms, T>(values[e], row, scales[e], shifts[e]);
    }
  }
}

// Mean and inverse of a row, of which each thread visits its elements by `each`, as often as the kind asks for.
template <int Warps, class Each>
__device__ __forceinline__ ac::RowStatistics statistics(Each each, int columns, float eps, int kind, float* scratch, int warp, int lane) {
  if (kind == ac::norm_layer) return ac::row_statistics<ac::norm_layer, Warps>(each, columns, eps, scratch, warp, lane);
  return ac::row_statistics<ac::norm_rms, Warps>(each, columns, eps, scratch, warp, lane);
}

// Of a rotation's style.
constexpr int interleaved = 1;  // channels turn with their neighbours
constexpr int unrounded = 2;    // its products are not rounded, only their sum is

__device__ __forceinline__ float product(float a, float b, int style) {
  const float whole = __fmul_rn(a, b);
  return style & unrounded ? whole : ac::round_to<T>(whole);
}

// Turns channels `low` with those half of the rotary part away; `cosines` and `sines` are those of `low`. In T where each product is
// rounded: the same numbers by a fifth of the instructions.
__device__ __forceinline__ void turn_halves(Vector& low, Vector& high, const T* cosines, const T* sines, int half, int style) {
  const Vector low_cosines = Vector::load(cosines), low_sines = Vector::load(sines);
  const Vector high_cosines = Vector::load(cosines + half), high_sines = Vector::load(sines + half);
  if (sizeof(T) == 4 || !(style & unrounded)) {
    const Vector turned = low.times(low_cosines).minus(high.times(low_sines));
    high = high.times(high_cosines).plus(low.times(high_sines));
    low = turned;
    return;
  }
  if constexpr (sizeof(T) == 2) {  // two elements at a time: all of them in fp32 are too many registers
#pragma unroll
    for (int w = 0; w < size / 2; ++w) {
      const float2 a = low.pair(w), b = high.pair(w), c = low_cosines.pair(w), s = low_sines.pair(w);
      const float2 other_c = high_cosines.pair(w), other_s = high_sines.pair(w);
      low.set_pair(w, __fmul_rn(a.x, c.x) - __fmul_rn(b.x, s.x), __fmul_rn(a.y, c.y) - __fmul_rn(b.y, s.y));
      high.set_pair(w, __fmul_rn(b.x, other_c.x) + __fmul_rn(a.x, other_s.x), __fmul_rn(b.y, other_c.y) + __fmul_rn(a.y, other_s.y));
    }
  }
}

// Turns each channel with its neighbour; `cosines` and `sines` are those of `vector`.
__device__ __forceinline__ void turn_neighbours(Vector& vector, const T* cosines, const T* sines, int style) {
  float values[size], c[size], s[size];
  vector.unpack(values);
  Vector::load(cosines).unpack(c);
  Vector::load(sines).unpack(s);
#pragma unroll
  for (int e = 0; e < size; e += 2) {
    const float even = values[e], odd = values[e + 1];
    values[e] = product(even, c[e], style) + product(-odd, s[e], style);
    values[e + 1] = product(odd, c[e + 1], style) + product(even, s[e + 1], style);
  }
  vector = Vector::pack(values);
}

template <int Warps>
__device__ __forceinline__ void norm_row(const T* x, const T* weight, const T* bias, T* out, int columns, float eps, int kind, int thread,
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
  const ac::RowStatistics row = statistics<Warps>(each, columns, eps, kind, scratch, thread / ac::warp_size, thread % ac::warp_size);
  for (int at = first; at < columns; at += step) {
    float values[size];
    Vector::load(x + at).unpack(values);
    norm_vector(values, weight != nullptr ? weight + at : nullptr, bias != nullptr ? bias + at : nullptr, row, kind);
    Vector::pack(values).store(out + at);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
norm_rows_warp(const Plan::T* x, const Plan::T* weight, const Plan::T* bias, Plan::T* out, int rows, int columns, float eps, int kind) {
  wait_in_chain();
  const long long row = static_cast<long long>(blockIdx.x) * warps + threadIdx.x / ac::warp_size;
  if (row >= rows) return;
  const long long offset = row * columns;
  norm_row<1>(x + offset, weight, bias, out + offset, columns, eps, kind, threadIdx.x % ac::warp_size, nullptr);
}

extern "C" __global__ void __launch_bounds__(Plan::threads)
norm_rows_block(const Plan::T* x, const Plan::T* weight, const Plan::T* bias, Plan::T* out, int rows, int columns, float eps, int kind) {
  wait_in_chain();
  __shared__ float scratch[warps];
  const long long offset = static_cast<long long>(blockIdx.x) * columns;
  norm_row<warps>(x + offset, weight, bias, out + offset, columns, eps, kind, threadIdx.x, scratch);
}

// A thread turns one vector of channels and that half of the rotary part away from it, or one of neighbours, or copies one of the rest.
extern "C" __global__ void __launch_bounds__(Plan::threads)
rope_rows(const Plan::T* x, const Plan::T* cos, const Plan::T* sin, Plan::T* out, int tokens, int heads, int dim, int rotary,
          long long token_stride, long long head_stride, int by_neighbours) {
  wait_in_chain();
  const int half = by_neighbours ? rotary : rotary / 2;  // channels of the vectors that threads turn
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
  Vector low = Vector::load(from + channel);
  if (by_neighbours) {
    turn_neighbours(low, cosines + channel, sines + channel, 0);
    low.store(to + channel);
    return;
  }
  Vector high = Vector::load(from + channel + half);
  turn_halves(low, high, cosines + channel, sines + channel, half, 0);
  low.store(to + channel);
  high.store(to + channel + half);
}

extern "C" __global__ void __launch_bounds__(Plan::threads)
add_norm_rows(const Plan::T* left, const Plan::T* right, const Plan::T* weight, const Plan::T* bias, Plan::T* total, Plan::T* out,
              int columns, float eps, int kind) {
  wait_in_chain();
  constexpr int held = 2, step = Plan::threads * size;
  __shared__ float scratch[warps];
  const long long offset = static_cast<long long>(block_from_the_end()) * columns;
  const int first = threadIdx.x * size;
  Vector kept[held];
  auto sum = [&](int at) {
    float values[size], others[size];
    Vector::load(left + offset + at).unpack(values);
    Vector::load(right + offset + at).unpack(others);
#pragma unroll
    for (int e = 0; e < size; ++e) values[e] += others[e];
    const Vector both = Vector::pack(values);
    both.store(total + offset + at);
    return both;
  };
  auto visit_all = [&](const Vector& vector, auto visit) {
    float values[size];
    vector.unpack(values);
#pragma unroll
    for (int e = 0; e < size; ++e) visit(values[e]);
  };
  bool is_summed = false;  // then what is not kept is read again
  auto each = [&](auto visit) {
#pragma unroll
    for (int i = 0; i < held; ++i) {
      if (first + i * step >= columns) continue;
      if (!is_summed) kept[i] = sum(first + i * step);
      visit_all(kept[i], visit);
    }
#pragma unroll 1
    for (int at = first + held * step; at < columns; at += step) {
      visit_all(is_summed ? Vector::load(total + offset + at) : sum(at), visit);
    }
    is_summed = true;
  };
  const ac::RowStatistics row = statistics<warps>(each, columns, eps, kind, scratch, threadIdx.x / ac::warp_size,
                                                  threadIdx.x % ac::warp_size);
  auto write = [&](const Vector& vector, int at) {
    float values[size];
    vector.unpack(values);
    norm_vector(values, weight != nullptr ? weight + at : nullptr, bias != nullptr ? bias + at : nullptr, row, kind);
    Vector::pack(values).store(out + offset + at);
  };
#pragma unroll
  for (int i = 0; i < held; ++i) {
    if (first + i * step < columns) write(kept[i], first + i * step);
  }
#pragma unroll 1
  for (int at = first + held * step; at < columns; at += step) write(Vector::load(total + offset + at), at);
}

constexpr int tokens_at_once = 2;  // whose vectors a thread of place_heads has on their way

__device__ __forceinline__ float sum_of_squares(const Vector& x) {
  float values[size], sum = 0.0f;
  x.unpack(values);
#pragma unroll
  for (int e = 0; e < size; ++e) sum = fmaf(values[e], values[e], sum);
  return sum;
}

// A vector of a head behind an RMS norm; `weight` is null or points to the vector's.
__device__ __forceinline__ Vector normed_vector(const Vector& x, float inverse, const T* weight, int kind) {
  float values[size];
  x.unpack(values);
  if (kind == ac::norm_rms) {
#pragma unroll
    for (int e = 0; e < size; ++e) values[e] *= inverse;
    const Vector rounded = Vector::pack(values);
    return weight != nullptr ? rounded.times(Vector::load(weight)) : rounded;
  }
  norm_vector(values, weight, nullptr, ac::RowStatistics{0.0f, inverse}, kind);
  return Vector::pack(values);
}

extern "C" __global__ void __launch_bounds__(Plan::threads, 3)
place_heads(const Plan::T* q, const Plan::T* k, const Plan::T* v, const Plan::T* q_weight, const Plan::T* k_weight,
            const Plan::T* v_weight, const Plan::T* cos, const Plan::T* sin, const long long* at, Plan::T* q_out, Plan::T* k_out,
            Plan::T* v_out, int q_heads, int k_heads, int v_heads, int q_token, int k_token, int v_token, int q_head, int k_head,
            int v_head, int q_out_token, int k_out_token, int v_out_token, int q_out_head, int k_out_head, int v_out_head, int tokens,
            int capacity, int each, int dim, int rotary, int lanes, int normed, int turned, int moved, int style, float eps, int kind) {
  wait_in_chain();
  const unsigned item = static_cast<unsigned>(block_from_the_end()) * Plan::threads + threadIdx.x;
  const unsigned all = static_cast<unsigned>(q_heads + k_heads + v_heads), row = item >> (31 - __clz(lanes));
  const int lane = static_cast<int>(item) & (lanes - 1), number = static_cast<int>(row % all);
  const int first = static_cast<int>(row / all) * each, end = min(first + each, tokens);
  // 0: a query, 1: a key, 2: a value
  const int which = number < q_heads ? 0 : number < q_heads + k_heads ? 1 : 2;
  const int head = number - (which == 0 ? 0 : which == 1 ? q_heads : q_heads + k_heads);
  const bool turns = turned >> which & 1;
  const int half = turns && !(style & interleaved) ? rotary / 2 : 0;
  const int place = lane * size;
  const bool here = place < dim / 2;
  const int low_at = place < half ? place : 2 * place;  // where no halves turn neighbours go together
  const int high_at = place < half ? place + half : low_at + size;
  const int from_token = which == 0 ? q_token : which == 1 ? k_token : v_token;
  const int to_token = which == 0 ? q_out_token : which == 1 ? k_out_token : v_out_token;
  const T* const from = (which == 0 ? q : which == 1 ? k : v) +
                        static_cast<long long>(head) * (which == 0 ? q_head : which == 1 ? k_head : v_head);
  T* const to = (which == 0 ? q_out : which == 1 ? k_out : v_out) +
                static_cast<long long>(head) * (which == 0 ? q_out_head : which == 1 ? k_out_head : v_out_head);
  const T* const weight = which == 0 ? q_weight : which == 1 ? k_weight : v_weight;
  const int ahead = moved >> which & 1 ? static_cast<int>(min(at[0], static_cast<long long>(capacity))) : 0;
  const int room = which == 0 ? tokens : capacity;
  const float per_channel = 1.0f / static_cast<float>(dim);

#pragma unroll 1
  for (int begin = first; begin < first + each; begin += tokens_at_once) {
    Vector low[tokens_at_once], high[tokens_at_once];
#pragma unroll
    for (int t = 0; t < tokens_at_once; ++t) {
      low[t] = high[t] = Vector::zero();
      if (!here || begin + t >= end) continue;
      const T* const row_of_token = from + static_cast<long long>(begin + t) * from_token;
      low[t] = Vector::load(row_of_token + low_at);
      high[t] = Vector::load(row_of_token + high_at);
    }
#pragma unroll
    for (int t = 0; t < tokens_at_once; ++t) {
      const int token = begin + t;
      if (token - first >= each) break;  // of all lanes
      if (normed != 0) {  // by all lanes of the warp, whichever theirs are
        float squares = sum_of_squares(low[t]) + sum_of_squares(high[t]);
        for (int offset = lanes / 2; offset > 0; offset /= 2) squares += __shfl_xor_sync(ac::full_warp, squares, offset);
        if (here && normed >> which & 1) {
          const float inverse = rsqrtf(squares * per_channel + eps);
          low[t] = normed_vector(low[t], inverse, weight != nullptr ? weight + low_at : nullptr, kind);
          high[t] = normed_vector(high[t], inverse, weight != nullptr ? weight + high_at : nullptr, kind);
        }
      }
      if (!here || token >= end || token + ahead >= room) continue;
      const long long angles = static_cast<long long>(token) * rotary;
      if (place < half) {
        turn_halves(low[t], high[t], cos + angles + place, sin + angles + place, half, style);
      } else if (turns && style & interleaved) {
        if (low_at < rotary) turn_neighbours(low[t], cos + angles + low_at, sin + angles + low_at, style);
        if (high_at < rotary) turn_neighbours(high[t], cos + angles + high_at, sin + angles + high_at, style);
      }
      T* const place_of_token = to + static_cast<long long>(token + ahead) * to_token;
      low[t].store(place_of_token + low_at);
      high[t].store(place_of_token + high_at);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads)
gate_rows(const Plan::T* gate, const Plan::T* up, Plan::T* out, int rows, int columns, int gate_row, int up_row, int activation) {
  wait_in_chain();
  const unsigned vectors = static_cast<unsigned>(columns) / size;
  const unsigned item = static_cast<unsigned>(block_from_the_end()) * Plan::threads + threadIdx.x;
  const unsigned row = item / vectors, column = item % vectors * size;
  if (row >= static_cast<unsigned>(rows)) return;
  float values[size], factors[size];
  Vector::load(gate + static_cast<long long>(row) * gate_row + column).unpack(values);
  Vector::load(up + static_cast<long long>(row) * up_row + column).unpack(factors);
#pragma unroll
  for (int e = 0; e < size; ++e) values[e] = ac::gated<T>(activation, values[e], factors[e]);
  Vector::pack(values).store(out + static_cast<long long>(row) * columns + column);
}

template <class Weight>
__device__ __forceinline__ void weigh(const T* x, const Weight* weights, Weight* out, int tokens, int slots, int columns) {
  wait_in_chain();
  const unsigned vectors = static_cast<unsigned>(columns) / size;
  const unsigned item = static_cast<unsigned>(block_from_the_end()) * Plan::threads + threadIdx.x;
  const unsigned token = item / vectors, column = item % vectors * size;
  if (token >= static_cast<unsigned>(tokens)) return;
  float sums[size] = {};
  for (int slot = 0; slot < slots; ++slot) {
    const long long row = static_cast<long long>(token) * slots + slot;
    float values[size];
    Vector::load(x + row * columns + column).unpack(values);
    const float weight = ac::to_float(weights[row]);
#pragma unroll
    for (int e = 0; e < size; ++e) sums[e] += ac::to_float(ac::from_float<Weight>(values[e] * weight));
  }
  using Result = ac::Vec16<Weight>;
  Weight* const place = out + static_cast<long long>(token) * columns + column;
#pragma unroll
  for (int part = 0; part < size / Result::size; ++part) {
    float values[Result::size];
#pragma unroll
    for (int e = 0; e < Result::size; ++e) values[e] = sums[part * Result::size + e];
    Result::pack(values).store(place + part * Result::size);
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads)
weigh_rows(const Plan::T* x, const Plan::T* weights, Plan::T* out, int tokens, int slots, int columns) {
  weigh(x, weights, out, tokens, slots, columns);
}

extern "C" __global__ void __launch_bounds__(Plan::threads)
weigh_rows_wide(const Plan::T* x, const float* weights, float* out, int tokens, int slots, int columns) {
  weigh(x, weights, out, tokens, slots, columns);
}

extern "C" __global__ void __launch_bounds__(Plan::threads)
merge_rows(const Plan::T* part0, const Plan::T* part1, const Plan::T* part2, const Plan::T* part3, const Plan::T* part4,
           const float* sum0, const float* sum1, const float* sum2, const float* sum3, const float* sum4, Plan::T* out,
           int tokens, int heads, int dim) {
  wait_in_chain();
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
