// The linear layers of a mixture of experts for many rows, each by its chosen experts, by warpgroups (wgmma), fp16 and bf16, sm_90a:
//
//   deal_rows     puts the choices [pairs] (i64: row by row, `slots` each) in the order of their experts, and cuts them into tiles
//   expert_rows   out[p, i] = sum over j of x[p / share, j] weight[e(p), i, j] + bias[e(p), i]; a null bias is none
//
// x [pairs / share, terms], share = 1 or slots (all choices of a row read the same one); weight [experts, columns, terms], or
// [experts, terms, columns] where Plan::transposed; bias [experts, columns]; out [pairs, columns], dense; fp32 sums. Rows and columns are
// whole vectors of 16 bytes.
//
// `deal`, which the first kernel makes for the second: how many bands of Plan::rows choices there are (int4), for each band the number of
// its expert, where that one's choices begin, how many they are, and its first band (int4 each, `most_bands` of them), and the choices by
// place. Within an expert their order is any: a row's sums do not depend on it.
//
// A tile is Plan::rows choices of one expert times 256 columns. Slices of 64 terms lie in a ring of Plan::stages (wgmma.cuh): the third
// warpgroup copies the rows, wherever they lie, 16 bytes a thread (cp.async) into the places that the swizzle asks for, and one thread of it
// has the copy engine fetch the matrix. Copies are waited for `behind` slices later, then fenced for the products and announced. Two
// warpgroups multiply: below each other where a tile has 128 rows, beside each other where it has 64. Blocks stay and take tile after
// tile, so that the ring is filled while results are stored. Of an expert's tiles those of the same columns come one after the other: its
// matrix is read once, however many rows it has.
// Wins wherever a token chooses few of many experts: their matrices are read once, and nothing is multiplied that nobody chose.
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/quads.cuh>
#include <agentcompile/wgmma.cuh>

#include "plan.cuh"

namespace {

using T = Plan::T;
constexpr int groups = 2;  // warpgroups that multiply
constexpr int rows = Plan::rows;
constexpr bool is_tall = rows == groups * 64;
constexpr int columns_of_tile = 256;
constexpr int columns_of_group = is_tall ? columns_of_tile : columns_of_tile / groups;
constexpr int stages = Plan::stages;
constexpr int behind = 1;  // slices whose rows are on their way while the next one is asked for
constexpr int depth = wg::span;
constexpr int vector = 16 / sizeof(T);
constexpr int x_elements = rows * depth;
constexpr int weight_elements = columns_of_tile * depth;
constexpr int stage_elements = x_elements + weight_elements;
constexpr int copiers = 128;
constexpr int vectors_of_line = depth / vector;
constexpr int lines_at_once = copiers / vectors_of_line;
constexpr int lines_each = rows / lines_at_once;
static_assert((is_tall || rows == 64) && lines_at_once % 8 == 0, "tiles of 64 or 128 rows");
static_assert(behind + 2 <= stages, "a place is freed by the product of the next slice, which must have been announced by then");
static_assert(Plan::dealers == Plan::most_experts, "each of the dealers has an expert");

__host__ __device__ constexpr int bands_of(int choices) { return (choices + rows - 1) / rows; }

// Choices of one expert that lie one after the other, and the columns that they are multiplied by.
struct Tile {
  int expert, first, count, column;
};

// What deal_rows leaves, in this order.
struct Deal {
  int4* head;
  int most_bands;

  __device__ __forceinline__ int bands() const { return head->x; }
  __device__ __forceinline__ int4* band(int number) const { return head + 1 + number; }
  __device__ __forceinline__ int* order() const { return reinterpret_cast<int*>(head + 1 + most_bands); }

  __device__ __forceinline__ Tile tile(int number, int across) const {
    const int4 found = *band(number / across);
    const int high = bands_of(found.z), inside = number - found.w * across;
    const int before = inside % high * rows;
    return {found.x, found.y + before, min(rows, found.z - before), inside / high * columns_of_tile};
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::dealers)
deal_rows(const long long* chosen, int4* deal, int pairs, int most_bands) {
  __shared__ int counts[Plan::most_experts];
  __shared__ long long sums[2][Plan::most_experts];  // bands above, choices below
  const Deal dealt{deal, most_bands};
  ac::launch_dependents();
  const int expert = threadIdx.x;
  counts[expert] = 0;
  __syncthreads();
  ac::grid_dependency_wait();
  for (int pair = threadIdx.x; pair < pairs; pair += Plan::dealers) atomicAdd(counts + chosen[pair], 1);
  __syncthreads();
  const int count = counts[expert];
  const int bands = bands_of(count);
  int from = 0;
  sums[0][expert] = static_cast<long long>(bands) << 32 | count;
  for (int step = 1; step < Plan::most_experts; step *= 2) {
    __syncthreads();
    sums[1 - from][expert] = sums[from][expert] + (expert >= step ? sums[from][expert - step] : 0);
    from = 1 - from;
  }
  const long long behind_it = sums[from][expert];  // of all experts up to this one
  const int first = static_cast<int>(behind_it & 0xffffffff) - count;
  const int first_band = static_cast<int>(behind_it >> 32) - bands;
  for (int band = 0; band < bands; ++band) *dealt.band(first_band + band) = make_int4(expert, first, count, first_band);
  if (expert == Plan::most_experts - 1) *dealt.head = make_int4(static_cast<int>(behind_it >> 32), 0, 0, 0);
  __syncthreads();
  counts[expert] = first;
  __syncthreads();
  for (int pair = threadIdx.x; pair < pairs; pair += Plan::dealers) dealt.order()[atomicAdd(counts + chosen[pair], 1)] = pair;
}

extern "C" __global__ void __launch_bounds__(Plan::threads, 1)
expert_rows(const T* x, const __grid_constant__ wg::Tiles weight, const T* bias, int4* deal, T* out, int share, int columns, int terms,
            int most_bands) {
  WG_DYNAMIC_SHARED(shared_bytes);
  T* const ring = reinterpret_cast<T*>(shared_bytes);
  ac::Mbarrier* const full = reinterpret_cast<ac::Mbarrier*>(ring + stages * stage_elements);
  ac::Mbarrier* const free = full + stages;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    wg::prefetch(weight);
    for (int stage = 0; stage < stages; ++stage) {
      ac::mbarrier_init(full + stage, 1 + copiers / 32);
      ac::mbarrier_init(free + stage, groups * 4);
    }
    ac::mbarrier_init_fence();
  }
  __syncthreads();
  ac::grid_dependency_wait();
  const Deal dealt{deal, most_bands};
  const int across = (columns + columns_of_tile - 1) / columns_of_tile;
  const int slices = (terms + depth - 1) / depth;
  const int tiles = dealt.bands() * across;
  wg::Turn<stages> turn;

  if (group == groups) {
    wg::shrink_registers<Plan::copier_registers>();
    const int copier = threadIdx.x % copiers;
    const int line = copier / vectors_of_line, at = copier % vectors_of_line;
    const int place_in_slice = line * depth + (at ^ line % 8) * vector;
    wg::Turn<stages> landing;
    int on_their_way = 0;
    const auto announce = [&]() {
      wg::proxy_fence();
      __syncwarp();
      if (lane == 0) ac::mbarrier_arrive(full + landing.stage);
      landing.next();
    };
    for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
      const Tile tile = dealt.tile(number, across);
      const T* from[lines_each];
#pragma unroll
      for (int i = 0; i < lines_each; ++i) {
        const int pair = dealt.order()[tile.first + min(line + i * lines_at_once, tile.count - 1)];
        from[i] = x + static_cast<long long>(pair / share) * terms + at * vector;
      }
      for (int slice = 0; slice < slices; ++slice) {
        ac::mbarrier_wait(free + turn.stage, turn.parity ^ 1);
        T* const place = ring + turn.stage * stage_elements;
        if (copier == 0) {
          ac::mbarrier_arrive_expect_bytes(full + turn.stage, weight_elements * sizeof(T));
          if constexpr (Plan::transposed) {
#pragma unroll
            for (int panel = 0; panel < columns_of_tile / 64; ++panel) {
              wg::fetch<1>(place + x_elements + panel * 64 * depth, weight, tile.column + panel * 64, slice * depth, tile.expert, 0,
                           full + turn.stage, 1);
            }
          } else {
            wg::fetch<1>(place + x_elements, weight, slice * depth, tile.column, tile.expert, 0, full + turn.stage, 1);
          }
        }
        const bool inside = slice * depth + at * vector < terms;
#pragma unroll
        for (int i = 0; i < lines_each; ++i) {
          ac::cp_async16_zero_fill(place + place_in_slice + i * lines_at_once * depth, inside ? from[i] + slice * depth : x, inside);
        }
        ac::cp_async_commit();
        turn.next();
        if (on_their_way == behind) {
          ac::cp_async_wait<behind>();
          announce();
        } else {
          ++on_their_way;
        }
      }
    }
    ac::cp_async_wait<0>();
    for (; on_their_way > 0; --on_their_way) announce();
  } else {
    wg::grow_registers<Plan::registers>();
    const int row_of_group = is_tall ? group * 64 : 0, column_of_group = is_tall ? 0 : group * columns_of_group;
    const auto release = [&](int stage) {
      if (lane == 0) ac::mbarrier_arrive(free + stage);
    };
    for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
      const Tile tile = dealt.tile(number, across);
      const int column = tile.column + column_of_group;
      int pairs[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = row_of_group + threadIdx.x / 32 % 4 * 16 + 8 * h + lane / 4;
        pairs[h] = row < tile.count ? dealt.order()[tile.first + row] : -1;
      }
      float sums[columns_of_group / 2] = {};
      int before = turn.stage;
      for (int slice = 0; slice < slices; ++slice) {
        ac::mbarrier_wait(full + turn.stage, turn.parity);
        if (row_of_group < tile.count) {
          const T* const place = ring + turn.stage * stage_elements;
          const unsigned long long left = wg::descriptor(place + row_of_group * wg::span);
          const unsigned long long right = wg::descriptor(place + x_elements + column_of_group * depth);
          wg::fence();
#pragma unroll
          for (int t = 0; t < depth / 16; ++t) {
            wg::multiply<T, columns_of_group, true, !Plan::transposed>(sums, left + t * wg::next_terms<true>,
                                                                       right + t * wg::next_terms<!Plan::transposed>);
          }
          wg::commit();
        }
        wg::wait<1>();
        if (slice > 0) release(before);
        before = turn.stage;
        turn.next();
      }
      wg::wait<0>();
      wg::settle(sums);
      release(before);

      const T* const added = bias == nullptr ? nullptr : bias + static_cast<long long>(tile.expert) * columns;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int j = 0; j < columns_of_group / 8; j += 4) {
          unsigned words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float* const sum = sums + 4 * (j + i) + 2 * h;
            const int first = column + 8 * (j + i) + 2 * (lane % 4);
            const bool adds = added != nullptr && first < columns;
            words[i] = ac::packed<T>(sum[0] + (adds ? ac::to_float(added[first]) : 0.0f),
                                     sum[1] + (adds ? ac::to_float(added[first + 1]) : 0.0f));
          }
          ac::transpose(words);
          const int first = column + 8 * (j + lane % 4);
          if (pairs[h] >= 0 && first < columns) {
            *reinterpret_cast<uint4*>(out + static_cast<long long>(pairs[h]) * columns + first) =
                make_uint4(words[0], words[1], words[2], words[3]);
          }
        }
      }
    }
  }
}
