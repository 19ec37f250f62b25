// Work that several blocks share: the last block to arrive finishes it, in a fixed order, without float atomics.
//
// `merge_partials` combines partial softmax results: a part holds, for scores in units of log2, its maximum, the sum of
// 2^(score - maximum) and the sum of 2^(score - maximum) * value.
#pragma once
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>

namespace ac {

// The running maximum before the first score. Finite, so that the difference of two empty parts is 0 and not NaN.
constexpr float softmax_floor = -3.0e38f;

struct SoftmaxState {
  float maximum;
  float sum;
};

// The cached positions that a token at `position` attends to, first .. length - 1, in tiles of Tile dealt out to the splits
// round robin; the first `active` splits have any. At most `window` positions, and those of the token's own chunk of `Chunk`; 0: all.
// The caller checks the capacity; here it only keeps memory safe.
struct Span {
  int position;
  int length;
  int first;
  int active;

  __device__ __forceinline__ bool is_cached(int index) const { return index < min(length, position); }
};

template <int Tile, int Chunk = 0>
__device__ __forceinline__ Span span_of(long long position, int capacity, int window, int splits) {
  Span span;
  span.position = static_cast<int>(position);
  span.length = min(span.position + 1, capacity);
  span.first = window > 0 ? max(0, span.length - window) : 0;
  if constexpr (Chunk > 0) span.first = max(span.first, (span.length - 1) / Chunk * Chunk);
  span.active = min((span.length - span.first + Tile - 1) / Tile, splits);
  return span;
}

// Whether this block is the last of `expected` blocks to come here. The last one sees everything that the others wrote
// before (read it with load_relaxed) and sets *counter back to 0 for the next launch. Called by all threads of the block;
// `last` is one flag in shared memory.
__device__ __forceinline__ bool arrive_last(unsigned int* counter, unsigned int expected, bool* last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    *last = atomicAdd(counter, 1u) + 1u == expected;
    if (*last) {
      __threadfence();
      atomicExch(counter, 0u);  // behind the fence, which would wait for it
    }
  }
  __syncthreads();
  return *last;
}

__device__ __forceinline__ void scale(float& total, float factor) { total *= factor; }
__device__ __forceinline__ void scale(float4& total, float factor) {
  total = make_float4(total.x * factor, total.y * factor, total.z * factor, total.w * factor);
}
__device__ __forceinline__ void add_weighted(float& total, float weight, float part) { total = fmaf(weight, part, total); }
__device__ __forceinline__ void add_weighted(float4& total, float weight, const float4& part) {
  total = make_float4(fmaf(weight, part.x, total.x), fmaf(weight, part.y, total.y), fmaf(weight, part.z, total.z),
                      fmaf(weight, part.w, total.w));
}

// One output element, or four of one head, from `count` parts, in order: state(i) gives part i's (maximum, sum) as float2, output(i)
// its weighted sums, a float or a float4. `Batch` parts are read before the first is used, so that their latencies overlap. Returns
// the weighted sums relative to the merged state, not yet divided by its sum.
template <int Batch, class State, class Output>
__device__ __forceinline__ auto merge_partials(int count, State state, Output output, SoftmaxState& merged) {
  using Value = decltype(output(0));
  merged = SoftmaxState{softmax_floor, 0.0f};
  Value total{};
  for (int first = 0; first < count; first += Batch) {
    float2 states[Batch];
    Value outputs[Batch];
#pragma unroll
    for (int i = 0; i < Batch; ++i) {
      const bool present = first + i < count;
      states[i] = present ? state(first + i) : make_float2(softmax_floor, 0.0f);
      outputs[i] = present ? output(first + i) : Value{};
    }
    float maximum = merged.maximum;
#pragma unroll
    for (int i = 0; i < Batch; ++i) maximum = fmaxf(maximum, states[i].x);
    if (first > 0) {  // else there is nothing yet
      const float rescale = quick_exp2(merged.maximum - maximum);
      scale(total, rescale);
      merged.sum *= rescale;
    }
    merged.maximum = maximum;
#pragma unroll
    for (int i = 0; i < Batch; ++i) {
      const float weight = quick_exp2(states[i].x - maximum);
      add_weighted(total, weight, outputs[i]);
      merged.sum = fmaf(weight, states[i].y, merged.sum);
    }
  }
  return total;
}

// Divides by the softmax denominator. A sink is one more score (in units of log2) whose value is zero.
__device__ __forceinline__ float softmax_divide(float total, SoftmaxState state) { return total / state.sum; }

__device__ __forceinline__ float softmax_divide_with_sink(float total, SoftmaxState state, float sink) {
  const float maximum = fmaxf(state.maximum, sink);
  const float rescale = quick_exp2(state.maximum - maximum);
  return total * rescale / fmaf(state.sum, rescale, quick_exp2(sink - maximum));
}

// Global memory in which the splits of one of `heads` heads merge: of each split of each head its outputs, then of each its states, 4 *
// heads * splits * Group * (HeadDim + 2) bytes, 16-byte aligned; and a counter of arrivals for each head.
struct SplitMemory {
  float* workspace;
  unsigned int* counters;
  int head;
  int heads;
};

// The end of a split attention block: combines the warps of the block and, in the last block, the splits.
//
// `outputs` and `states` [Warps][Group] (maximum, sum) in shared memory, written by the warps, not yet synchronized: `outputs.of(warp, i)` is
// output i of the Group * HeadDim of a warp, wherever that lies; `outputs.team(n)`, for n < Warps, as many floats, 16-byte aligned, in
// memory that may be what the warps wrote. `finish(i, total, state)` is called once for each of the Group * HeadDim outputs of the head.
// `active` of the gridDim.x splits have work.
//
// The last block has the latency of the L2 before it, not its bandwidth. So its threads read four outputs each, and as many teams as
// there are threads for read runs of splits beside each other; their results are merged like those of warps. Up to eight splits are
// one team's, which adds them up in one round.
template <int Threads, int Warps, int Group, int HeadDim, class Outputs, class Finish>
__device__ __forceinline__ void merge_splits(const Outputs& outputs, float2 (&states)[Warps][Group], const SplitMemory& memory, int active,
                                             bool* last, Finish finish) {
  static_assert(HeadDim % 4 == 0, "four neighbouring outputs belong to one head");
  constexpr int width = Group * HeadDim, vectors = width / 4, batch = 8;
  constexpr int teams = Threads / vectors < 1 ? 1 : Threads / vectors < Warps ? Threads / vectors : Warps;
  const long long first_part = static_cast<long long>(memory.head) * gridDim.x;
  float* part_outputs = memory.workspace + first_part * width;
  float2* part_states = reinterpret_cast<float2*>(memory.workspace + static_cast<long long>(memory.heads) * gridDim.x * width) +
                        first_part * Group;
  __syncthreads();
  for (unsigned i = threadIdx.x; i < width; i += Threads) {
    SoftmaxState merged;
    const float total = merge_partials<Warps>(
        Warps, [&](int warp) { return states[warp][i / HeadDim]; }, [&](int warp) { return outputs.of(warp, i); }, merged);
    if (active == 1) {
      finish(i, total, merged);
    } else {
      part_outputs[blockIdx.x * width + i] = total;
      if (i % HeadDim == 0) part_states[blockIdx.x * Group + i / HeadDim] = make_float2(merged.maximum, merged.sum);
    }
  }
  if (active == 1 || !arrive_last(memory.counters + memory.head, active, last)) return;
  const int each = max(batch, (active + teams - 1) / teams), busy = (active + each - 1) / each;  // splits of a team; teams
  for (unsigned i = threadIdx.x; i < busy * vectors; i += Threads) {
    const int team = i / vectors, first = team * each, output = i % vectors * 4, head = output / HeadDim;
    SoftmaxState merged;
    const float4 total = merge_partials<batch>(
        min(each, active - first), [&](int split) { return load_relaxed(&part_states[(first + split) * Group + head]); },
        [&](int split) { return load_relaxed(reinterpret_cast<const float4*>(&part_outputs[(first + split) * width + output])); }, merged);
    if (busy == 1) {
      finish(output, total.x, merged);
      finish(output + 1, total.y, merged);
      finish(output + 2, total.z, merged);
      finish(output + 3, total.w, merged);
    } else {
      *reinterpret_cast<float4*>(outputs.team(team) + output) = total;
      if (output % HeadDim == 0) states[team][head] = make_float2(merged.maximum, merged.sum);
    }
  }
  if (busy == 1) return;
  __syncthreads();
  for (unsigned i = threadIdx.x; i < width; i += Threads) {
    SoftmaxState merged;
    const float total = merge_partials<teams>(
        busy, [&](int team) { return states[team][i / HeadDim]; }, [&](int team) { return outputs.team(team)[i]; }, merged);
    finish(i, total, merged);
  }
}

// What the splits of a KV head share, and what each way to merge them does before the end of a block: `open` at the start of the
// kernel, `opened` before the dependency wait, `expect(active)` where the block has work and knows how many others have.
//
// Through a cluster barrier: of every block its weighted sums, maxima and sums.
template <int Blocks, int Group, int HeadDim> struct ClusterParts {
  float outputs[Blocks][Group * HeadDim];
  float maxima[Blocks][Group];
  float sums[Blocks][Group];

  __device__ __forceinline__ void open() { cluster_arrive_relaxed(); }
  __device__ __forceinline__ void opened() {}
  __device__ __forceinline__ void expect(int) {}
};
template <int Group, int HeadDim> struct ClusterParts<0, Group, HeadDim> {  // through global memory
  __device__ __forceinline__ void open() {}
  __device__ __forceinline__ void opened() {}
  __device__ __forceinline__ void expect(int) {}
};

// As merge_splits where the splits of a KV head are one cluster of Blocks blocks: each block pushes every 32 outputs into the
// shared memory of the block that finishes them, so one cluster barrier stands in for fence, counter and global memory.
// Each block has called parts.open() when it started, and blocks without work have exited. `parts`: shared.
template <int Threads, int Warps, int Group, int HeadDim, int Blocks, class Outputs, class Finish>
__device__ __forceinline__ void merge_cluster(const Outputs& outputs, const float2 (&states)[Warps][Group],
                                              ClusterParts<Blocks, Group, HeadDim>& parts, int active, Finish finish) {
  constexpr int width = Group * HeadDim;
  const int block = blockIdx.x;
  __syncthreads();
  if (active > 1) cluster_wait();  // the others have started
  for (unsigned i = threadIdx.x; i < width; i += Threads) {
    SoftmaxState merged;
    const int head = i / HeadDim;
    const float total = merge_partials<Warps>(
        Warps, [&](int warp) { return states[warp][head]; }, [&](int warp) { return outputs.of(warp, i); }, merged);
    if (active == 1) {
      finish(i, total, merged);
      continue;
    }
    store_to_cluster(&parts.outputs[block][i], i / warp_size % active, total);
    if (i % HeadDim < active) {
      store_to_cluster(&parts.maxima[block][head], i % HeadDim, merged.maximum);
      store_to_cluster(&parts.sums[block][head], i % HeadDim, merged.sum);
    }
  }
  if (active == 1) return;
  __syncwarp();  // the barrier is executed by whole warps
  cluster_arrive_release();
  cluster_wait();
  for (unsigned i = threadIdx.x; i < width; i += Threads) {
    if (i / warp_size % active != block) continue;
    SoftmaxState merged;
    const int head = i / HeadDim;
    const float total = merge_partials<Blocks>(
        active, [&](int other) { return make_float2(parts.maxima[other][head], parts.sums[other][head]); },
        [&](int other) { return parts.outputs[other][i]; }, merged);
    finish(i, total, merged);
  }
}

// By messages: of every block its states and those of its weighted sums that this block owns, and the barrier that counts their bytes.
template <int Blocks, int Group, int HeadDim> struct MessageParts {
  static constexpr int width = Group * HeadDim;
  static constexpr int chunk = 16;  // floats that have one owner; the active blocks own runs of neighbouring chunks
  static constexpr int chunks = (width + chunk - 1) / chunk;
  static_assert(HeadDim % 2 == 0, "both values of a pair belong to one head");
  // Of `active` blocks none owns more than chunks / active of them, rounded up; from each it has as many.
  alignas(16) float outputs[(chunks + Blocks - 1) * chunk];
  float2 states[Blocks][Group];
  Mbarrier arrived;

  static __device__ __forceinline__ int owner(unsigned i, int active) { return i / chunk * active / chunks; }
  // The quotient is exact (half a chunk keeps it off whole numbers) and quick: dividing by how many blocks have work would stand between the
  // arrival of q and its use.
  static __device__ __forceinline__ int first_owned(int block, int active) {  // of the outputs
    static_assert(Blocks <= 16 && chunks < 1 << 12, "half a chunk is more than the reciprocal errs by");
    const float rounded_up = (static_cast<float>(block * chunks + active) - 0.5f) * quick_reciprocal(static_cast<float>(active));
    return min(static_cast<int>(rounded_up) * chunk, width);
  }
  // Where output i from block `from` lies in the block that owns it, whose first one is `first`: by chunks, of each those of all blocks.
  static __device__ __forceinline__ int place(unsigned i, unsigned first, int from, int active) {
    return ((i - first) / chunk * active + from) * chunk + i % chunk;
  }

  // The arrival has nothing to publish but the barrier, for which the fence is enough; so it is relaxed.
  __device__ __forceinline__ void open() {
    if (threadIdx.x == 0) {
      mbarrier_init(&arrived, 1);
      mbarrier_init_fence();
    }
    __syncwarp();  // the barrier is executed by whole warps
    cluster_arrive_relaxed();
  }
  __device__ __forceinline__ void opened() { cluster_wait(); }  // those of all others; from here on they may be sent to
  // What comes before this is counted as well: the phase is open until this arrival. The last warp's: the first ones prepare heads meanwhile.
  __device__ __forceinline__ void expect(int active) {
    if (threadIdx.x != blockDim.x - warp_size || active == 1) return;
    const int owned = first_owned(blockIdx.x + 1, active) - first_owned(blockIdx.x, active);
    const int bytes = owned * static_cast<int>(sizeof(float)) + Group * static_cast<int>(sizeof(float2));
    mbarrier_arrive_expect_bytes(&arrived, static_cast<unsigned>(active * bytes));
  }
};

// As merge_cluster, by messages: each block sends every output to the block that finishes it and its states to all, and waits for
// the bytes that it owns instead of for all threads of the cluster. Every block has called parts.open() and parts.opened(); those
// without work have exited, the others have called parts.expect(active). `parts`: shared.
template <int Threads, int Warps, int Group, int HeadDim, int Blocks, class Outputs, class Finish>
__device__ __forceinline__ void merge_messages(const Outputs& outputs, const float2 (&states)[Warps][Group],
                                               MessageParts<Blocks, Group, HeadDim>& parts, int active, Finish finish) {
  using Parts = MessageParts<Blocks, Group, HeadDim>;
  constexpr int pairs = Parts::width / 2, head_pairs = HeadDim / 2, rounds = (pairs + Threads - 1) / Threads;
  const int block = blockIdx.x;
  __syncthreads();
#pragma unroll(rounds <= 4 ? rounds : 1)
  for (int round = 0; round < rounds; ++round) {
    const unsigned pair = round * Threads + threadIdx.x;
    if ((round + 1) * Threads > pairs && pair >= pairs) break;
    const int head = pair / head_pairs, owner = Parts::owner(2 * pair, active);
    const int place = Parts::place(2 * pair, Parts::first_owned(owner, active), block, active);
    SoftmaxState merged;
    float total[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[half] = merge_partials<Warps>(
          Warps, [&](int warp) { return states[warp][head]; }, [&](int warp) { return outputs.of(warp, 2 * pair + half); }, merged);
    }
    if (active == 1) {
      finish(2 * pair, total[0], merged);
      finish(2 * pair + 1, total[1], merged);
      continue;
    }
    send_to_cluster(&parts.outputs[place], owner, make_float2(total[0], total[1]), &parts.arrived);
#pragma unroll
    for (int first = 0; first < Blocks; first += head_pairs) {  // one round, unless heads are narrower than the cluster
      const int other = first + static_cast<int>(pair % head_pairs);
      if (other < active) send_to_cluster(&parts.states[block][head].x, other, make_float2(merged.maximum, merged.sum), &parts.arrived);
    }
  }
  if (active == 1) return;
  const unsigned first = Parts::first_owned(block, active), end = Parts::first_owned(block + 1, active);
  mbarrier_wait_cluster(&parts.arrived, 0);
  for (unsigned i = first + threadIdx.x; i < end; i += Threads) {
    SoftmaxState merged;
    const int head = i / HeadDim;
    auto state = [&](int other) { return other < active ? parts.states[other][head] : make_float2(softmax_floor, 0.0f); };
    const float* own = parts.outputs + Parts::place(i, first, 0, active);
    auto output = [&](int other) { return other < active ? own[other * Parts::chunk] : 0.0f; };
    // Those without work change nothing: one round, unrolled, and where few have any a shorter one.
    const float total = Blocks > 4 && active <= Blocks / 2 ? merge_partials<(Blocks + 1) / 2>((Blocks + 1) / 2, state, output, merged)
                                                           : merge_partials<Blocks>(Blocks, state, output, merged);
    finish(i, total, merged);
  }
}

// The end of a split attention block by each of the three ways, which are told apart by what the splits share.
template <int Threads, int Warps, int Group, int HeadDim, class Outputs, class Finish>
__device__ __forceinline__ void merge_attention(const Outputs& outputs, float2 (&states)[Warps][Group], ClusterParts<0, Group, HeadDim>&,
                                                const SplitMemory& memory, int active, bool* last, Finish finish) {
  merge_splits<Threads, Warps, Group, HeadDim>(outputs, states, memory, active, last, finish);
}
template <int Threads, int Warps, int Group, int HeadDim, int Blocks, class Outputs, class Finish>
__device__ __forceinline__ void merge_attention(const Outputs& outputs, float2 (&states)[Warps][Group], ClusterParts<Blocks, Group, HeadDim>& parts,
                                                const SplitMemory&, int active, bool*, Finish finish) {
  merge_cluster<Threads, Warps, Group, HeadDim, Blocks>(outputs, states, parts, active, finish);
}
template <int Threads, int Warps, int Group, int HeadDim, int Blocks, class Outputs, class Finish>
__device__ __forceinline__ void merge_attention(const Outputs& outputs, float2 (&states)[Warps][Group], MessageParts<Blocks, Group, HeadDim>& parts,
                                                const SplitMemory&, int active, bool*, Finish finish) {
  merge_messages<Threads, Warps, Group, HeadDim, Blocks>(outputs, states, parts, active, finish);
}

}  // namespace ac
