// A token drawn by exponential clocks, argmax of probability / clock, from odds that are made of 16-bit scores alone (ops/odds.py).
//
// logits [n] of T; clocks [n] fp32, positive; token [1]; refused [1]: whether the probabilities would be no numbers (a NaN or an
// infinity among the scores, or nothing but minus infinity). Scores of 16 bits have 65,536 values at the most, so a count of each
// says all that top-k, top-p and min-p ask for: nothing is sorted, and sums have one order. Three launches behind each other:
//   draw_count    counts [65536], zero before: how many scores there are of each value, by keys that rise with the value
//   draw_bounds   one block; bounds [4]: the smallest key that is kept, the first index of that key's elements that is kept (of equals
//                 the later ones are likelier to be), the score of the likeliest, the probability of all that is kept (times the
//                 likeliest's); see Bounds
//   draw_pick     best [1] and counter [1], zero before: the largest of all probabilities over their clocks, the smallest index among
//                 equals, by one 64-bit maximum of both
// Wins over sorting for any vocabulary: a score is read twice, and of the counts 256 KB three times by one block.
#include <agentcompile/dtype.cuh>
#include <agentcompile/reduce.cuh>
#include <agentcompile/split.cuh>
#include "plan.cuh"

namespace {

using T = Plan::T;
using Vector = ac::Vec16<T>;
constexpr int keys = 65536;
constexpr int keys_each = keys / Plan::bounding;
constexpr int warps = Plan::threads / ac::warp_size;

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

// Visits the keys from `above` down to `lowest` with the count of each that is not 0, as long as `visit` says so; four in one load.
template <class Visit> __device__ __forceinline__ void each_count(const int* counts, int above, int lowest, Visit visit) {
#pragma unroll 4
  for (int key = above; key > above - keys_each && key >= lowest; key -= 4) {
    const int4 four = *reinterpret_cast<const int4*>(counts + key - 3);
    const int found[4] = {four.w, four.z, four.y, four.x};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (found[i] > 0 && key - i >= lowest && !visit(key - i, found[i])) return;
    }
  }
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

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads) draw_count(const Plan::T* logits, int* counts, int n) {
  each_element(logits, n, [&](int, T value) { atomicAdd(&counts[key_of(value)], 1); });
}

extern "C" __global__ void __launch_bounds__(Plan::bounding)
draw_bounds(const Plan::T* logits, const int* counts, int* bounds, int* refused, int n, float temperature, int top_k, float top_p,
            float min_p) {
  __shared__ double masses[Plan::bounding];
  __shared__ int sums[Plan::bounding];
  __shared__ int largest, smallest, kept_of_smallest, first, bad;
  const int thread = threadIdx.x;
  const int above = keys - 1 - thread * keys_each;  // the largest key of this thread's, which have falling keys from thread 0 on
  if (thread == 0) {
    largest = -1;
    smallest = keys;
    kept_of_smallest = 0;
    first = 0;
    bad = 0;
  }
  __syncthreads();

  T infinity = ac::from_float<T>(__int_as_float(0x7f800000));
  T minus_infinity = ac::from_float<T>(-__int_as_float(0x7f800000));
  const int key_of_infinity = key_of(infinity), key_of_minus_infinity = key_of(minus_infinity);
  int mine = 0, top = -1;
  bool wrong = false;
  each_count(counts, above, 0, [&](int key, int count) {
    mine += count;
    top = max(top, key);
    wrong = wrong || key >= key_of_infinity || key < key_of_minus_infinity;
    return true;
  });
  if (top >= 0) atomicMax(&largest, top);
  if (wrong) atomicMax(&bad, 1);
  int total;
  const int before = sum_before(mine, sums, total);

  // The k-th largest: all that equal it are kept.
  const int wanted = top_k > 0 && top_k < n ? top_k : n;
  if (before < wanted && wanted <= before + mine) {
    int rank = before;
    each_count(counts, above, 0, [&](int key, int count) {
      rank += count;
      smallest = key;
      kept_of_smallest = count;
      return rank < wanted;
    });
  }
  __syncthreads();
  const float most = value_of(largest) / temperature;
  if (thread == 0) refused[0] = bad || largest <= key_of_minus_infinity || !(fabsf(most) < __int_as_float(0x7f800000));
  const int least = smallest;
  auto chance_of = [&](int key) { return chance(value_of(key) / temperature, most); };
  auto mass = [&](int lowest, int of_lowest) {
    double sum = 0.0;
    if (mine == 0) return sum;
    each_count(counts, above, lowest, [&](int key, int count) {
      sum += (key == lowest ? of_lowest : count) * static_cast<double>(chance_of(key));
      return true;
    });
    return sum;
  };

  // The likeliest that hold the share of top_p: an element is kept while those before it hold less.
  double all;
  const double likelier = sum_before(mass(least, kept_of_smallest), masses, all);
  int lowest = keys, of_lowest = 0;
  if (top_p < 1.0f) {
    const double share = all - all * static_cast<double>(1.0f - top_p);
    double held = likelier;
    each_count(counts, mine > 0 ? above : -1, least, [&](int key, int count) {
      const bool is_largest = key == largest;
      if (!(held < share) && !is_largest) return false;
      const double each = chance_of(key);
      int some = count;
      if (held + each * count >= share && each > 0.0) {
        const double fit = (share - held) / each;
        some = fit >= count ? count : static_cast<int>(ceil(fit));
        if (some < 1) some = is_largest ? 1 : 0;
      }
      if (some == 0) return false;
      lowest = key;
      of_lowest = some;
      held += each * count;
      return true;
    });
    if (thread == 0) smallest = keys;
    __syncthreads();
    if (lowest < keys) atomicMin(&smallest, lowest);
    __syncthreads();
    if (lowest == smallest) kept_of_smallest = of_lowest;
    __syncthreads();
  }

  // Those that are likely enough beside the likeliest.
  if (min_p > 0.0f) {
    const int from = smallest;
    lowest = keys;
    each_count(counts, mine > 0 ? above : -1, from, [&](int key, int) {
      if (chance_of(key) >= min_p || key == largest) lowest = key;
      return true;
    });
    __syncthreads();
    if (thread == 0) smallest = keys;
    __syncthreads();
    if (lowest < keys) atomicMin(&smallest, lowest);
    __syncthreads();
    if (lowest == smallest && lowest != from) kept_of_smallest = counts[lowest];
    __syncthreads();
  }

  // Of the elements that equal the smallest the later ones are kept: the index from which on.
  const int edge = smallest;
  int left = kept_of_smallest;
  if (left < counts[edge]) {
    constexpr int tile = Plan::bounding * Vector::size;
    for (int end = (n + tile - 1) / tile * tile; end > 0 && left > 0; end -= tile) {
      const int begin = end - tile + thread * Vector::size;
      int equal = 0;
      for (int e = 0; e < Vector::size; ++e) equal += begin + e < n && key_of(logits[begin + e]) == edge;
      int in_tile;
      const int later = -sum_before(equal, sums, in_tile) - equal;
      const int behind = in_tile + later;  // equals behind this thread's, in the tile
      if (behind < left && left <= behind + equal) {
        int rank = behind, e = Vector::size;
        while (rank < left) {
          --e;
          rank += begin + e < n && key_of(logits[begin + e]) == edge;
        }
        first = begin + e;
      }
      left -= in_tile;
      __syncthreads();
    }
  }
  double kept;
  sum_before(mass(edge, kept_of_smallest), masses, kept);
  if (thread == 0) {
    Bounds found{edge, first, most, static_cast<float>(kept)};
    *reinterpret_cast<Bounds*>(bounds) = found;
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads)
draw_pick(const Plan::T* logits, const float* clocks, const int* bounds, unsigned long long* best, unsigned int* counter, long long* token,
          int n, float temperature) {
  __shared__ unsigned long long candidates[warps];
  __shared__ bool last;
  const Bounds given = *reinterpret_cast<const Bounds*>(bounds);
  unsigned long long mine = 0;
  each_element(logits, n, [&](int i, T value) {
    const int key = key_of(value);
    if (key < given.key || (key == given.key && i < given.first)) return;
    const float ratio = chance(ac::to_float(value) / temperature, given.most) / given.kept / clocks[i];
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
