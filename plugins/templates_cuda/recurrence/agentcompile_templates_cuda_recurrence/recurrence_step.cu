// One token of a linear recurrence, a selective scan or a gated delta rule, in fp32, its state in place:
//
//   S = f S;  S += w keys^T;  y = S queries + skip x;  out = Epilogue(y, aux)    with w = x, or strength (x - S keys) for delta rules
//
// A row of S for each element of x [heads * width], with `terms` terms. It lies row by row, terms side by side, or (Plan::by_rows) head by
// head [terms, width], rows side by side; addresses are multiples of 16 bytes. Keys and queries [groups, terms] are shared by
// Plan::rows_of_group rows; Plan::keys_eps and queries_eps above 0: divided by their root of summed squares, then queries by
// Plan::queries_scale. f = exp(step rate): step is `decay` [heads], or of every term (Plan::decay_each), with `decay_bias` added and as
// softplus where Plan says so; rate is `rates` [heads], or of every term (Plan::rates_each), or -exp of them (Plan::log_rates), or 1.
// Where it is scaled, w = step x. `strength` [heads], as Plan::strength_scale sigmoid of it where Plan::sigmoid; skip [heads].
//
// `lanes` threads of a warp share a row; a thread holds `held` rows (four neighbours where they lie side by side) of terms / lanes terms in
// registers, from before the dependency wait on where Plan::early: this kernel wrote them a token ago (docs/decisions/0048).
// Wins over the framework's operators by their launches: all that is computed of a token besides takes as long as its state's bytes.
#include <agentcompile/activation.cuh>
#include <agentcompile/dtype.cuh>
#include <agentcompile/ptx.cuh>
#include <agentcompile/reduce.cuh>

#include "plan.cuh"

namespace {

constexpr int terms = Plan::terms, lanes = Plan::lanes, held = Plan::held;
constexpr int each = terms / lanes;
constexpr int beside = ac::warp_size / lanes;  // threads of a warp that have the same terms
constexpr int rows_of_warp = beside * held;
constexpr int lane_step = Plan::by_rows ? beside : 1;  // from one lane of a row to the next
constexpr bool step_of_terms = Plan::decay_each > 1, rate_of_terms = Plan::rates_each > 1;
constexpr int steps = step_of_terms ? each : 1, rates_held = rate_of_terms ? each : 1;
static_assert(Plan::by_rows ? held == 4 && terms % lanes == 0 : terms % (4 * lanes) == 0, "whole quads");
static_assert(Plan::rows_of_group % rows_of_warp == 0 && (!Plan::by_rows || Plan::width % rows_of_warp == 0), "a warp has one group's rows");

// Where a thread stands: its lane of a row, its first row of all, and the terms and rows it holds.
struct Place {
  int lane, first;

  __device__ __forceinline__ int term(int j) const { return Plan::by_rows ? j * lanes + lane : (j / 4 * lanes + lane) * 4 + j % 4; }
  __device__ __forceinline__ int row(int r) const { return first + (Plan::by_rows ? r : r * beside); }
  __device__ __forceinline__ int head(int r) const { return row(r) / Plan::width; }
  // The quad of S that holds elements 4 q .. 4 q + 3 of a row's part, or term q of four rows.
  __device__ __forceinline__ long long quad(int r, int q) const {
    if constexpr (Plan::by_rows) {
      return (static_cast<long long>(head(0)) * terms + term(q)) * Plan::width + first % Plan::width;
    }
    return static_cast<long long>(row(r)) * terms + term(4 * q);
  }
};
constexpr int quads = Plan::by_rows ? each : each / 4, quad_rows = Plan::by_rows ? 1 : held;

__device__ __forceinline__ float lane_sum(float value) {
#pragma unroll
  for (int offset = lane_step; offset < lane_step * lanes; offset *= 2) value += __shfl_xor_sync(ac::full_warp, value, offset);
  return value;
}

// Visits the four elements of a quad: row, term of the thread and place in the quad.
template <class Visit> __device__ __forceinline__ void visit(int r, int q, Visit with) {
#pragma unroll
  for (int i = 0; i < 4; ++i) with(Plan::by_rows ? i : r, Plan::by_rows ? q : 4 * q + i, i);
}

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Terms of one line of keys or queries, as they are or of length 1.
template <class T> __device__ __forceinline__ void load_line(float (&to)[each], const T* line, const Place& place, float eps, float scale) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < each; ++j) {
    to[j] = ac::to_float(line[place.term(j)]);
    squares = fmaf(to[j], to[j], squares);
  }
  const float factor = eps > 0.0f ? rsqrtf(lane_sum(squares) + eps) : 1.0f;
#pragma unroll
  for (int j = 0; j < each; ++j) to[j] = to[j] * factor * scale;
}

// What a head has of its own that no token changes; of every row of the thread.
struct Parameters {
  float rate[held][rates_held], bias[held][steps], skip[held];

  __device__ __forceinline__ void load_rates(const Plan::Rates* rates, const Place& place) {
#pragma unroll
    for (int r = 0; r < held; ++r) {
#pragma unroll
      for (int j = 0; j < rates_held; ++j) {
        const float given = Plan::rates_each == 0 ? 1.0f : ac::to_float(rates[place.head(r) * Plan::rates_each + (rate_of_terms ? place.term(j) : 0)]);
        rate[r][j] = Plan::log_rates ? -expf(given) : given;
      }
    }
  }
  __device__ __forceinline__ void load_bias(const Plan::Bias* given, const Place& place) {
#pragma unroll
    for (int r = 0; r < held; ++r) {
#pragma unroll
      for (int j = 0; j < steps; ++j) {
        bias[r][j] = Plan::has_bias ? ac::to_float(given[place.head(r) * Plan::decay_each + (step_of_terms ? place.term(j) : 0)]) : 0.0f;
      }
    }
  }
  __device__ __forceinline__ void load_skip(const Plan::Skip* given, const Place& place) {
#pragma unroll
    for (int r = 0; r < held; ++r) skip[r] = Plan::has_skip ? ac::to_float(given[place.head(r)]) : 0.0f;
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Plan::threads)
recurrence_step_kernel(float* state, const Plan::X* x, const Plan::Keys* keys, const Plan::Queries* queries, const Plan::Decay* decay,
                       const Plan::Bias* decay_bias, const Plan::Rates* rates, const Plan::Strength* strength, const Plan::Skip* skip,
                       const Plan::Aux0* aux0, const Plan::Aux1* aux1, Plan::T* out, int all_rows) {
  if (Plan::pdl) ac::launch_dependents();
  const int thread = threadIdx.x % ac::warp_size, warp = (blockIdx.x * Plan::threads + threadIdx.x) / ac::warp_size;
  const int of_warp = Plan::by_rows ? thread % beside * held : thread / lanes;
  const Place place{Plan::by_rows ? thread / beside : thread % lanes, warp * rows_of_warp + of_warp};
  const bool is_here = warp * rows_of_warp < all_rows;

  float s[held][each] = {};
  Parameters of;
  auto load_state = [&](auto load) {
#pragma unroll
    for (int r = 0; r < quad_rows; ++r) {
#pragma unroll
      for (int q = 0; q < quads; ++q) {
        const uint4 bits = load(state + place.quad(r, q));
        const float four[4] = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
        visit(r, q, [&](int row, int term, int i) { s[row][term] = four[i]; });
      }
    }
  };
  if (is_here) {
    if (Plan::early) load_state([](const float* from) { return ac::load_settled16(from); });
    if (Plan::knows_rates) of.load_rates(rates, place);
    if (Plan::knows_bias) of.load_bias(decay_bias, place);
    if (Plan::knows_skip) of.load_skip(skip, place);
  }
  ac::grid_dependency_wait();
  if (!is_here) return;  // whole warps
  if (!Plan::early) load_state([](const float* from) { return ac::load_stream16(from); });
  if (!Plan::knows_rates) of.load_rates(rates, place);
  if (!Plan::knows_bias) of.load_bias(decay_bias, place);
  if (!Plan::knows_skip) of.load_skip(skip, place);

  const int group = place.first / Plan::rows_of_group;
  float key[each], query[each], of_x[held], step[held][steps], power[held];
#pragma unroll
  for (int r = 0; r < held; ++r) {
    of_x[r] = ac::to_float(x[place.row(r)]);
    if constexpr (Plan::is_delta) {
      const float given = ac::to_float(strength[place.head(r)]);
      power[r] = Plan::sigmoid ? Plan::strength_scale * ac::sigmoid(given) : given;
    }
#pragma unroll
    for (int j = 0; j < steps; ++j) {
      const float given = ac::to_float(decay[place.head(r) * Plan::decay_each + (step_of_terms ? place.term(j) : 0)]) + of.bias[r][j];
      step[r][j] = Plan::softplus ? softplus(given) : given;
    }
  }
  load_line(key, keys + group * terms, place, Plan::keys_eps, 1.0f);
  load_line(query, queries + group * terms, place, Plan::queries_eps, Plan::queries_scale);

  float sum[held];
#pragma unroll
  for (int r = 0; r < held; ++r) {
    float of_row = expf(step[r][0] * of.rate[r][0]), known = 0.0f;
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const bool differs = step_of_terms || rate_of_terms;
      const float factor = differs ? expf(step[r][step_of_terms ? j : 0] * of.rate[r][rate_of_terms ? j : 0]) : of_row;
      s[r][j] *= factor;
      known = fmaf(s[r][j], key[j], known);
    }
    float added = Plan::is_scaled ? of_x[r] * step[r][0] : of_x[r];
    if constexpr (Plan::is_delta) added = power[r] * (added - lane_sum(known));
    sum[r] = 0.0f;
#pragma unroll
    for (int j = 0; j < each; ++j) {
      s[r][j] = fmaf(added, key[j], s[r][j]);
      sum[r] = fmaf(s[r][j], query[j], sum[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < quad_rows; ++r) {
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      float four[4];
      visit(r, q, [&](int row, int term, int i) { four[i] = s[row][term]; });
      *reinterpret_cast<float4*>(state + place.quad(r, q)) = make_float4(four[0], four[1], four[2], four[3]);
    }
  }
#pragma unroll
  for (int r = 0; r < held; ++r) {
    const float y = fmaf(of.skip[r], of_x[r], lane_sum(sum[r]));
    if (place.lane == 0) {
      const int row = place.row(r);
      const float acc[1] = {y};
      const float aux[2] = {Plan::has_aux0 ? ac::to_float(aux0[row]) : 0.0f, Plan::has_aux1 ? ac::to_float(aux1[row]) : 0.0f};
      out[row] = ac::from_float<Plan::T>(Epilogue::apply(acc, aux));
    }
  }
}
