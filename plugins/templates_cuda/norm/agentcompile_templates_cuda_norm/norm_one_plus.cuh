// Layer norms that multiply with 1 + w (Nemotron's): T((x - mean) r W(1 + w) + b), where W is the type of weights.
//
// The sum is rounded, as the framework's is, which adds by an operator of its own. This is part of the plan of such a norm: in its source
// every layer norm is one, and the sources of other norms stay as they are.
#include <agentcompile/row.cuh>

template <>
__device__ __forceinline__ float ac::normalize_unrounded<ac::norm_layer, Plan::T>(float x, ac::RowStatistics row, float scale, float shift) {
  return (x - row.mean) * row.inverse * ac::round_to<Plan::W>(1.0f + scale) + shift;
}

