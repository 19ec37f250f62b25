// A token drawn by exponential clocks, argmax of probability / clock, from odds that are made of 16-bit scores alone (ops/odds.py).
//
// logits [n] of T; clocks [n] fp32, positive; token [1]; refused [1]: whether the probabilities would be no numbers (a NaN or an
// infinity among the scores, or nothing but minus infinity). Scores of 16 bits have 65,536 values at the most, so a count of each
// says all that top-k, top-p and min-p ask for: nothing is sorted, and sums have one order. Three launches behind each other:
//   draw_count    counts [65536], zero before: how many scores there are of each value, by keys that rise with the value
//   draw_bounds   one block; bounds [4]: the smallest key that is kept, the first index of that key's elements that is kept (of equals
//                 the later ones are likelier to be), the score of the likeliest, the probability of all that is kept (times the
//                 likeliest's); see Bounds. Keys are taken in rows of 32, a row by a warp; most rows are empty, which costs nothing
//   draw_pick     best [1] and counter [1], zero before: the largest of all probabilities over their clocks, the smallest index among
//                 equals, by one 64-bit maximum of both
// `scale` is the inverse of the temperature, by which torch multiplies on a device; `left_out` is 1 - top_p in fp32, which transformers
// compares with; 0 for all. Wins over sorting the vocabulary; beside processors that sort nothing it is not measured.
#include <agentcompile/dtype.cuh>
#include <agentcompile/reduce.cuh>
#include <agentcompile/split.cuh>
#include "plan.cuh"

namespace {

using T = Plan::T;
using Vector = ac::Vec16<T>;
constexpr int keys = 65536;
constexpr int row_keys = ac::warp_size;
constexpr int rows = keys / row_keys;
constexpr int rows_each = rows / Plan::bounding;
constexpr int bounding_warps = Plan::bounding / ac::warp_size;
constexpr int in_flight = 8;  // rows whose counts a warp loads before it looks at the first
constexpr int warps = Plan::threads / ac::warp_size;
static_assert(rows % Plan::bounding == 0 && rows % (bounding_warps * in_flight) == 0, "rows are dealt out evenly");

union Bits {
  T value;
  unsigned short bits;
  __device__ Bits() {}
};

struct Bounds {
  int key;
  int first;
  float most;
  float kept;
};

// Rises with the value; both zeros have one key. NaNs lie beyond the keys of the infinities.
__device__ __forceinline__ int key_of(T value) {
  Bits given;
  given.value = value;
  const int bits = given.bits == 0x8000u ? 0 : given.bits;
  return bits & 0x8000 ? 0xffff ^ bits : bits | 0x8000;
}

__device__ __forceinline__ float value_of(int key) {
  Bits made;
  made.bits = static_cast<unsigned short>(key & 0x8000 ? key ^ 0x8000 : 0xffff ^ key);
  return ac::to_float(made.value);
}

__device__ __forceinline__ float chance(float score, float most) { return expf(score - most); }

// Visits every element of a thread's share with its index.
template <class Visit> __device__ __forceinline__ void each_element(const T* logits, int n, Visit visit) {
  const int thread = blockIdx.x * Plan::threads + threadIdx.x;
  const int threads = gridDim.x * Plan::threads;
  const int in_vectors = ac::is_aligned16(logits) ? n / Vector::size * Vector::size : 0;
  for (int i = thread * Vector::size; i < in_vectors; i += threads * Vector::size) {
    const Vector vector = Vector::load(logits + i);
    const T* elements = reinterpret_cast<const T*>(&vector);
#pragma unroll
    for (int e = 0; e < Vector::size; ++e) visit(i + e, elements[e]);
  }
  for (int i = in_vectors + thread; i < n; i += threads) visit(i, logits[i]);
}

// What the threads before this one hold together, and all of them. `scratch`: one entry per thread; free again afterwards.
template <class Value> __device__ Value sum_before(Value mine, Value* scratch, Value& total) {
  const int thread = threadIdx.x;
  scratch[thread] = mine;
  __syncthreads();
  for (int step = 1; step < Plan::bounding; step *= 2) {
    const Value other = thread >= step ? scratch[thread - step] : Value(0);
    __syncthreads();
    scratch[thread] += other;
    __syncthreads();
  }
  const Value before = thread > 0 ? scratch[thread - 1] : Value(0);
  total = scratch[Plan::bounding - 1];
  __syncthreads();
  return before;
}

template <class Value> __device__ __forceinline__ Value sum_of_warp(Value value) {
#pragma unroll
  for (int offset = ac::warp_size / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(ac::full_warp, value, offset);
  return value;
}

// The index from which on elements of key `edge` are kept, so that `kept` of them are: each warp counts those of a range of its own,
// and the one in whose range the first of them lies looks for it from the end. `found`: one entry per warp.
__device__ int first_of_last(const T* logits, int n, int edge, int kept, int* found, int* first) {
  const int warp = threadIdx.x / ac::warp_size, lane = threadIdx.x % ac::warp_size;
  const int range = (n + bounding_warps - 1) / bounding_warps;
  const int begin = min(n, warp * range), end = min(n, begin + range);
  int equal = 0;
#pragma unroll 8
  for (int i = begin + lane; i < end; i += ac::warp_size) equal += key_of(logits[i]) == edge;
  equal = sum_of_warp(equal);
  if (lane == 0) found[warp] = equal;
  __syncthreads();
  int behind = 0;
  for (int other = warp + 1; other < bounding_warps; ++other) behind += found[other];
  if (behind < kept && kept <= behind + equal) {
    int wanted = kept - behind;
    for (int last = end - 1; last >= begin; last -= ac::warp_size) {  // lane 0 looks at the last element
      const int i = last - lane;
      unsigned int those = __ballot_sync(ac::full_warp, i >= begin && key_of(logits[max(i, begin)]) == edge);
      const int some = __popc(those);
      if (some < wanted) {
        wanted -= some;
        continue;
      }
      while (--wanted > 0) those &= those - 1;  // the lowest lanes hold the last elements
      if (lane == 0) *first = last - (__ffs(static_cast<int>(those)) - 1);
      break;
    }
  }
  __syncthreads();
  return *first;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads) draw_count(const Plan::T* logits, int* counts, int n) {
  int key = -1, run = 0;  // neighbours are often equal where a part of a vocabulary is left out
  each_element(logits, n, [&](int, T value) {
    const int next = key_of(value);
    if (next != key) {
      if (run > 0) atomicAdd(&counts[key], run);
      key = next;
      run = 0;
    }
    ++run;
  });
  if (run > 0) atomicAdd(&counts[key], run);
}

extern "C" __global__ void __launch_bounds__(Plan::bounding)
draw_bounds(const Plan::T* logits, const int* counts, int* bounds, int* refused, int n, float scale, int top_k, float left_out,
            float min_p) {
  __shared__ double masses[rows];
  __shared__ int numbers[rows];
  __shared__ double sums[Plan::bounding];
  __shared__ int ranks[Plan::bounding];
  __shared__ int of_warps[bounding_warps];
  __shared__ int largest, smallest, kept_of_smallest, likely_enough, edge_row, first, bad;
  __shared__ double held_at_edge;
  const int thread = threadIdx.x, warp = thread / ac::warp_size, lane = thread % ac::warp_size;
  if (thread == 0) {
    largest = -1;
    smallest = 0;
    likely_enough = keys;
    edge_row = rows;
    first = 0;
    bad = 0;
  }
  __syncthreads();

  // How many scores each row has.
  const int key_of_infinity = key_of(ac::from_float<T>(__int_as_float(0x7f800000)));
  const int key_of_minus_infinity = key_of(ac::from_float<T>(__int_as_float(static_cast<int>(0xff800000u))));
  int top = -1;
  bool wrong = false;
  for (int row = warp; row < rows; row += bounding_warps * in_flight) {
    int some[in_flight];
#pragma unroll
    for (int i = 0; i < in_flight; ++i) some[i] = counts[(row + i * bounding_warps) * row_keys + lane];
#pragma unroll
    for (int i = 0; i < in_flight; ++i) {
      const int at = row + i * bounding_warps, key = at * row_keys + lane;
      if (some[i] > 0) {
        top = max(top, key);
        wrong = wrong || key >= key_of_infinity || key < key_of_minus_infinity;
      }
      const int number = sum_of_warp(some[i]);
      if (lane == 0) numbers[at] = number;
    }
  }
  if (top >= 0) atomicMax(&largest, top);
  if (wrong) atomicMax(&bad, 1);
  __syncthreads();
  const float most = value_of(largest) * scale;
  if (thread == 0) refused[0] = bad || largest <= key_of_minus_infinity || !(fabsf(most) < __int_as_float(0x7f800000));
  auto chance_of = [&](int key) { return chance(value_of(key) * scale, most); };
  const int last_row = rows - 1 - thread * rows_each;  // of this thread's rows, which fall from thread 0 on

  // The k-th largest: all that equal it are kept.
  if (top_k > 0 && top_k < n) {
    int mine = 0, all;
    for (int i = 0; i < rows_each; ++i) mine += numbers[last_row - i];
    int rank = sum_before(mine, ranks, all);
    if (rank < top_k && top_k <= rank + mine) {
      int row = last_row;
      while (rank + numbers[row] < top_k) rank += numbers[row--];
      int key = row * row_keys + row_keys;
      while (rank < top_k) rank += counts[--key];
      smallest = key;
    }
    __syncthreads();
  }
  const int least = smallest;

  // The mass of each row from there on, and the smallest key that is likely enough beside the likeliest.
  for (int row = warp; row < rows; row += bounding_warps) {
    double mass = 0.0;
    if (numbers[row] > 0 && row >= least / row_keys) {
      const int key = row * row_keys + lane, count = counts[key];
      if (count > 0 && key >= least) {
        const float each = chance_of(key);
        mass = count * static_cast<double>(each);
        if (each >= min_p || key == largest) atomicMin(&likely_enough, key);
      }
      mass = sum_of_warp(mass);
    }
    if (lane == 0) masses[row] = mass;
  }
  __syncthreads();
  double mine = 0.0, all;
  for (int i = 0; i < rows_each; ++i) mine += masses[last_row - i];
  double held = sum_before(mine, sums, all);
  if (thread == 0) {
    kept_of_smallest = counts[least];
    held_at_edge = all;
  }
  __syncthreads();

  // The likeliest that hold the share of top-p: an element is kept while those before it hold less.
  if (left_out > 0.0f) {
    const double share = all - all * static_cast<double>(left_out);
    const int top_row = largest / row_keys;
    double before = held;
    int mine_row = rows;
    for (int row = last_row; row > last_row - rows_each; --row) {
      if (numbers[row] > 0 && row >= least / row_keys && (before < share || row == top_row)) {
        mine_row = row;
        held = before;
      }
      before += masses[row];
    }
    if (mine_row < rows) atomicMin(&edge_row, mine_row);
    __syncthreads();
    if (mine_row < rows && mine_row == edge_row) {
      int edge = largest, kept = 1;
      double kept_mass = held;
      for (int key = mine_row * row_keys + row_keys - 1; key >= max(least, mine_row * row_keys); --key) {
        const int count = counts[key];
        if (count == 0) continue;
        if (!(held < share) && key != largest) break;
        const double each = chance_of(key);
        int some = count;
        if (held + each * count >= share && each > 0.0) {
          const double fit = ceil((share - held) / each);
          some = fit >= count ? count : fit < 1.0 ? 0 : static_cast<int>(fit);
          if (some == 0 && key == largest) some = 1;
        }
        if (some == 0) break;
        edge = key;
        kept = some;
        kept_mass = held + each * some;
        held += each * count;
      }
      smallest = edge;
      kept_of_smallest = kept;
      held_at_edge = kept_mass;
    }
    __syncthreads();
  }

  if (min_p > 0.0f && likely_enough > smallest) {
    const int edge = likely_enough;
    mine = 0.0;
    for (int row = last_row; row > last_row - rows_each; --row) mine += row > edge / row_keys ? masses[row] : 0.0;
    sum_before(mine, sums, all);
    if (thread == 0) {
      for (int key = edge / row_keys * row_keys + row_keys - 1; key >= edge; --key) {
        if (counts[key] > 0) all += counts[key] * static_cast<double>(chance_of(key));
      }
      held_at_edge = all;
      smallest = edge;
      kept_of_smallest = counts[edge];
    }
    __syncthreads();
  }

  const int edge = smallest, kept = kept_of_smallest;
  const int from = kept < counts[edge] ? first_of_last(logits, n, edge, kept, of_warps, &first) : 0;
  if (thread == 0) *reinterpret_cast<Bounds*>(bounds) = Bounds{edge, from, most, static_cast<float>(held_at_edge)};
}

extern "C" __global__ void __launch_bounds__(Plan::threads)
draw_pick(const Plan::T* logits, const float* clocks, const int* bounds, unsigned long long* best, unsigned int* counter, long long* token,
          int n, float scale) {
  __shared__ unsigned long long candidates[warps];
  __shared__ bool last;
  const Bounds given = *reinterpret_cast<const Bounds*>(bounds);
  unsigned long long mine = 0;
  each_element(logits, n, [&](int i, T value) {
    const int key = key_of(value);
    if (key < given.key || (key == given.key && i < given.first)) return;
    const float ratio = chance(ac::to_float(value) * scale, given.most) / given.kept / clocks[i];
    const unsigned int bits = static_cast<unsigned int>(__float_as_int(ratio));
    const unsigned long long candidate = static_cast<unsigned long long>(bits) << 32 | (0xffffffffu - static_cast<unsigned int>(i));
    if (!(ratio >= 0.0f)) return;
    mine = candidate > mine ? candidate : mine;
  });
#pragma unroll
  for (int offset = ac::warp_size / 2; offset > 0; offset /= 2) {
    const unsigned long long other = __shfl_xor_sync(ac::full_warp, mine, offset);
    mine = other > mine ? other : mine;
  }
  if (threadIdx.x % ac::warp_size == 0) candidates[threadIdx.x / ac::warp_size] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int other = 0; other < warps; ++other) mine = candidates[other] > mine ? candidates[other] : mine;
    atomicMax(best, mine);
  }
  if (!ac::arrive_last(counter, gridDim.x, &last) || threadIdx.x != 0) return;
  const unsigned long long found = atomicMax(best, 0ull);  // read where the others wrote
  token[0] = found == 0 ? 0 : static_cast<long long>(0xffffffffu - static_cast<unsigned int>(found & 0xffffffffu));
}
