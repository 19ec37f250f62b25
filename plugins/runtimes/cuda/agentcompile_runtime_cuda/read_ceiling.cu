// Reads `count` 16-byte words once and writes nothing: how fast this GPU's memory can be read by any kernel.
// Every thread keeps UNROLL loads in flight; neighbouring threads read neighbouring words. The sum is stored only for a
// value that practically never occurs, so that the loads cannot be removed.
#include <agentcompile/ptx.cuh>

extern "C" __global__ void read_ceiling(const uint4* data, unsigned* sink, long long count) {
  constexpr int UNROLL = 8;
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  unsigned sum = 0;
  for (; index + (UNROLL - 1) * stride < count; index += UNROLL * stride) {
    uint4 word[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) word[i] = ac::load_stream16(data + index + i * stride);
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) sum ^= word[i].x ^ word[i].y ^ word[i].z ^ word[i].w;
  }
  for (; index < count; index += stride) {
    const uint4 word = ac::load_stream16(data + index);
    sum ^= word.x ^ word.y ^ word.z ^ word.w;
  }
  if (sum == 0x9E3779B9u) *sink = sum;
}
