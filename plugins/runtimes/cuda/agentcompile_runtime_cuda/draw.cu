// A token drawn by exponential clocks, argmax of probability / clock, from odds that are made of 16-bit scores alone (ops/odds.py).
//
// logits [n] of T; clocks [n] fp32, positive; token [1]; refused [1]: whether the probabilities would be no numbers (a NaN or an
// infinity among the scores, or nothing but minus infinity). Scores of 16 bits have 65,536 values at the most, so a count of each
// says all that top-k, top-p and min-p ask for: nothing is sorted, and sums have one order. Three launches behind each other:
//   draw_count    counts [65536], zero before: how many scores there are of each value, by keys that rise with the value; the largest
//                 key and whether all are numbers in tally, zero before
//   draw_bounds   numbers, masses [2048]: of each row of 32 keys how many scores it has and their probability (times the likeliest's),
//                 a row by a warp, all over the device; the block that ends last has eight rows a thread in registers and says in
//                 bounds what is kept (see Bounds)
//   draw_pick     the largest of all probabilities over their clocks, the smallest index among equals. Elements of the smallest key
//                 that is kept may be kept in part, the later ones (of equals these are likelier to be): each block says in parts what
//                 it found above that key and among its elements, and how many these are; the block that ends last knows from which
//                 one on they are kept, and looks at that one again
// `scale` is the inverse of the temperature, by which torch multiplies on a device; `left_out` is 1 - top_p in fp32, which transformers
// compares with; 0 for all. Wins over sorting the vocabulary; beside processors that sort nothing it is not measured.
#include "draw_scores.cuh"

extern "C" __global__ void __launch_bounds__(Plan::threads) draw_count(const Plan::T* logits, int* counts, int* tally_words, int n) {
  __shared__ int scratch[warps];
  ac::grid_dependency_wait();
  if constexpr (Plan::pdl) ac::launch_dependents();
  Tally* tally = reinterpret_cast<Tally*>(tally_words);
  T elements[Vector::size];
  load_elements(logits, n, blockIdx.x, threadIdx.x, elements);
  const int key_of_infinity = key_of(ac::from_float<T>(__int_as_float(0x7f800000)));
  const int key_of_minus_infinity = key_of(ac::from_float<T>(__int_as_float(static_cast<int>(0xff800000u))));
  int key = -1, run = 0;  // neighbours are often equal where a part of a vocabulary is left out
  int largest = -1, no_number = 0;
#pragma unroll
  for (int e = 0; e < Vector::size; ++e) {
    if (index_of(blockIdx.x, threadIdx.x, e) >= n) break;
    const int next = key_of(elements[e]);
    if (next != key) {
      if (run > 0) atomicAdd(&counts[key], run);
      key = next;
      run = 0;
    }
    ++run;
    largest = max(largest, next);
    no_number |= next >= key_of_infinity || next < key_of_minus_infinity;
  }
  if (run > 0) atomicAdd(&counts[key], run);
  largest = largest_of_block(largest, scratch);
  no_number = largest_of_block(no_number, scratch);
  if (threadIdx.x == 0) {
    atomicMax(&tally->above_largest, largest + 1);
    if (no_number) atomicMax(&tally->no_number, 1);
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads)
draw_bounds(const int* counts, int* tally_words, int* numbers, double* masses, int* bounds, bool* refused, int n, float scale, int top_k,
            float left_out, float min_p) {
  __shared__ int ranks[warps];
  __shared__ double sums[warps];
  __shared__ int smallest, kept_of_smallest, edge_row, edge_rank;
  __shared__ double held_at_edge, mass_of_edge_row;
  __shared__ bool last;
  const int thread = threadIdx.x, warp = thread / ac::warp_size, lane = thread % ac::warp_size;
  ac::grid_dependency_wait();
  if constexpr (Plan::pdl) ac::launch_dependents();
  Tally* tally = reinterpret_cast<Tally*>(tally_words);
  const int largest = tally->above_largest - 1;
  const float most = value_of(largest) * scale;
  const auto chance_of = [&](int key) { return chance(value_of(key) * scale, most); };

  // How many scores each row has, and how likely they are together.
  const int first_row = (blockIdx.x * warps + warp) * rows_of_warp;
  int some[rows_of_warp];
#pragma unroll
  for (int i = 0; i < rows_of_warp; ++i) some[i] = counts[(first_row + i) * row_keys + lane];
  int likely_below = 0;
#pragma unroll
  for (int i = 0; i < rows_of_warp; ++i) {
    const int key = (first_row + i) * row_keys + lane;
    double mass = 0.0;
    if (some[i] > 0) {
      const float each = chance_of(key);
      mass = some[i] * static_cast<double>(each);
      if (each >= min_p || key == largest) likely_below = max(likely_below, keys - key);
    }
    const int number = sum_of_warp(some[i]);
    if (number > 0) mass = sum_of_warp(mass);
    if (lane == 0) {
      numbers[first_row + i] = number;
      masses[first_row + i] = mass;
    }
  }
  if (min_p > 0.0f) {
    likely_below = largest_of_block(likely_below, ranks);
    if (thread == 0 && likely_below > 0) atomicMax(&tally->likely_below, likely_below);
  }
  if (thread == 0) {
    smallest = 0;
    kept_of_smallest = all_of_them;
    edge_row = rows;
  }
  if (!ac::arrive_last(&tally->bounded, gridDim.x, &last)) return;

  // Rows fall from thread 0 on.
  const int top_row = rows - 1 - thread * rows_each;
  int number_of[rows_each];
  double mass_of[rows_each];
#pragma unroll
  for (int i = 0; i < rows_each; ++i) {
    number_of[i] = ac::load_relaxed(numbers + top_row - i);
    mass_of[i] = ac::load_relaxed(masses + top_row - i);
  }

  // The k-th largest: all that equal it are kept.
  if (top_k > 0 && top_k < n) {
    int mine = 0, all;
#pragma unroll
    for (int i = 0; i < rows_each; ++i) mine += number_of[i];
    int rank = sum_before(mine, ranks, all);
    if (rank < top_k && top_k <= rank + mine) {
      bool found = false;
#pragma unroll
      for (int i = 0; i < rows_each; ++i) {
        found = found || rank + number_of[i] >= top_k;
        if (!found) rank += number_of[i];
        if (found && edge_row == rows) edge_row = top_row - i;
      }
      edge_rank = rank;
    }
    __syncthreads();
    const int row = edge_row;
    if (warp == 0) {
      const int key = row * row_keys + row_keys - 1 - lane, count = counts[key];
      const unsigned int reached = __ballot_sync(ac::full_warp, edge_rank + sum_up_to(count, lane) >= top_k);
      const int at = __ffs(static_cast<int>(reached)) - 1;
      const double mass = sum_of_warp(lane <= at && count > 0 ? count * static_cast<double>(chance_of(key)) : 0.0);
      if (lane == at) smallest = key;
      if (lane == 0) mass_of_edge_row = mass;
    }
    __syncthreads();
    if (thread == 0) edge_row = rows;
#pragma unroll
    for (int i = 0; i < rows_each; ++i) {
      if (top_row - i < row) mass_of[i] = 0.0;
      if (top_row - i == row) mass_of[i] = mass_of_edge_row;
    }
    __syncthreads();
  }
  const int least = smallest;
  double mine = 0.0, all;
#pragma unroll
  for (int i = 0; i < rows_each; ++i) mine += mass_of[i];
  const double before = sum_before(mine, sums, all);
  if (thread == 0) held_at_edge = all;

  // The likeliest that hold the share of top-p: an element is kept while those before it hold less.
  if (left_out > 0.0f) {
    const double share = all - all * static_cast<double>(left_out);
    int mine_row = rows;
    double running = before, held_before = before;
#pragma unroll
    for (int i = 0; i < rows_each; ++i) {
      const int row = top_row - i;
      if (number_of[i] > 0 && row >= least / row_keys && (running < share || row == largest / row_keys)) {
        mine_row = row;
        held_before = running;
      }
      running += mass_of[i];
    }
    if (mine_row < rows) atomicMin(&edge_row, mine_row);
    __syncthreads();
    const int row = edge_row;
    if (mine_row < rows && mine_row == row) mass_of_edge_row = held_before;
    __syncthreads();
    if (warp == 0 && row < rows) {
      const int own_key = row * row_keys + row_keys - 1 - lane;
      const int own_count = own_key >= least ? counts[own_key] : 0;
      const double own_chance = chance_of(own_key);
      unsigned int left = __ballot_sync(ac::full_warp, own_count > 0);
      double held = mass_of_edge_row, kept_mass = held;
      int edge = largest, kept = 1;
      while (left != 0) {
        const int from = __ffs(static_cast<int>(left)) - 1;
        left &= left - 1;
        const int key = row * row_keys + row_keys - 1 - from, count = __shfl_sync(ac::full_warp, own_count, from);
        const double each = __shfl_sync(ac::full_warp, own_chance, from);
        if (!(held < share) && key != largest) break;
        int fits = count;
        if (held + each * count >= share && each > 0.0) {
          const double fit = ceil((share - held) / each);
          fits = fit >= count ? count : fit < 1.0 ? 0 : static_cast<int>(fit);
          if (fits == 0 && key == largest) fits = 1;
        }
        if (fits == 0) break;
        edge = key;
        kept = fits < count ? fits : all_of_them;
        kept_mass = held + each * fits;
        held += each * count;
      }
      if (lane == 0) {
        smallest = edge;
        kept_of_smallest = kept;
        held_at_edge = kept_mass;
      }
    }
    __syncthreads();
  }

  if (min_p > 0.0f) {
    const int likely = keys - ac::load_relaxed(&tally->likely_below);
    if (likely > smallest && likely < keys) {
      mine = 0.0;
#pragma unroll
      for (int i = 0; i < rows_each; ++i) mine += top_row - i > likely / row_keys ? mass_of[i] : 0.0;
      sum_before(mine, sums, all);
      if (warp == 0) {
        const int key = likely / row_keys * row_keys + lane, count = key >= likely ? counts[key] : 0;
        const double mass = sum_of_warp(count > 0 ? count * static_cast<double>(chance_of(key)) : 0.0);
        if (lane == 0) {
          held_at_edge = all + mass;
          smallest = likely;
          kept_of_smallest = all_of_them;
        }
      }
    }
    __syncthreads();
  }

  if (thread == 0) {
    const int key_of_minus_infinity = key_of(ac::from_float<T>(__int_as_float(static_cast<int>(0xff800000u))));
    *reinterpret_cast<Bounds*>(bounds) = Bounds{smallest, kept_of_smallest, most, static_cast<float>(held_at_edge)};
    refused[0] = tally->no_number || largest <= key_of_minus_infinity || !(fabsf(most) < __int_as_float(0x7f800000));
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads)
draw_pick(const Plan::T* logits, const float* clocks, const int* bounds, int* tally_words, long long* parts_words, long long* token, int n,
          float scale) {
  __shared__ unsigned long long candidates[warps];
  __shared__ int numbers[warps];
  __shared__ int torn_block, torn_kept;
  __shared__ bool last;
  ac::grid_dependency_wait();
  Tally* tally = reinterpret_cast<Tally*>(tally_words);
  Part* parts = reinterpret_cast<Part*>(parts_words);
  const Bounds given = *reinterpret_cast<const Bounds*>(bounds);
  const bool in_part = given.kept != all_of_them;
  T elements[Vector::size];
  load_elements(logits, n, blockIdx.x, threadIdx.x, elements);
  unsigned long long sure = 0, edge = 0;
  int count = 0;
#pragma unroll
  for (int e = 0; e < Vector::size; ++e) {
    const int index = index_of(blockIdx.x, threadIdx.x, e), key = key_of(elements[e]);
    if (index >= n || key < given.key) continue;
    const unsigned long long mine = candidate(given, elements[e], scale, clocks, index);
    if (in_part && key == given.key) {
      edge = larger(edge, mine);
      ++count;
    } else {
      sure = larger(sure, mine);
    }
  }
  sure = largest_of_block(sure, candidates);
  if (in_part) {
    edge = largest_of_block(edge, candidates);
    sum_before(count, numbers, count);
  }
  if (threadIdx.x == 0) parts[blockIdx.x] = Part{sure, edge, count, 0};
  if (!ac::arrive_last(&tally->picked, gridDim.x, &last)) return;

  // The last elements of the smallest key are kept: blocks are looked at from the end, `threads` of them at a time.
  const int blocks = gridDim.x;
  unsigned long long best = 0;
  int behind = 0;
  if (threadIdx.x == 0) torn_block = -1;
  for (int from = blocks - 1; from >= 0; from -= Plan::threads) {
    const int block = from - static_cast<int>(threadIdx.x);
    const Part* part = parts + max(block, 0);
    if (block >= 0) best = larger(best, ac::load_relaxed(&part->sure));
    if (!in_part) continue;
    const int equal = block >= 0 ? ac::load_relaxed(&part->count) : 0;
    int all;
    const int before = behind + sum_before(equal, numbers, all);
    if (equal > 0 && before + equal <= given.kept) best = larger(best, ac::load_relaxed(&part->edge));
    if (before < given.kept && given.kept < before + equal) {
      torn_block = block;
      torn_kept = given.kept - before;
    }
    behind += all;
  }
  __syncthreads();
  if (torn_block >= 0) {
    const int group = Plan::threads - 1 - threadIdx.x;  // from the end, too
    load_elements(logits, n, torn_block, group, elements);
    int mine = 0, all;
#pragma unroll
    for (int e = 0; e < Vector::size; ++e) mine += index_of(torn_block, group, e) < n && key_of(elements[e]) == given.key;
    int before = sum_before(mine, numbers, all);
#pragma unroll
    for (int e = Vector::size - 1; e >= 0; --e) {
      const int index = index_of(torn_block, group, e);
      if (index >= n || key_of(elements[e]) != given.key) continue;
      if (before++ < torn_kept) best = larger(best, candidate(given, elements[e], scale, clocks, index));
    }
  }
  best = largest_of_block(best, candidates);
  if (threadIdx.x == 0) token[0] = best == 0 ? 0 : static_cast<long long>(0xffffffffu - static_cast<unsigned int>(best & 0xffffffffu));
}
