"""Launches in a child process: sanitizer builds see what instrumentation cannot, and a dead child is a report, not a crash."""

import ctypes

import numpy as np
import pytest
from agentcompile_validator_emulation.engine import Mode, build
from agentcompile_validator_emulation.isolate import IsolatedLaunch, run_isolated
from agentcompile_validator_emulation.module import Access, EmulationError

COUNT = 128
CODE = r"""
#include <agentcompile/ptx.cuh>
extern "C" __global__ void clean(const float* in, float* out, int count) {
  __shared__ float staged[64];
  const int i = blockIdx.x * 64 + threadIdx.x;
  staged[63 - threadIdx.x] = i < count ? in[i] : 0.0f;
  __syncthreads();
  if (i < count) out[i] = staged[threadIdx.x];
}
extern "C" __global__ void heap_overflow(const float* in, float* out, int count) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  if (i < count) out[i] = in[i + 1];
}
extern "C" __global__ void shared_overflow(const float* in, float* out, int count) {
  __shared__ float staged[64];
  const int i = blockIdx.x * 64 + threadIdx.x;
  staged[threadIdx.x + (in[0] < 1e30f)] = in[i];
  __syncthreads();
  out[i] = staged[threadIdx.x];
}
extern "C" __global__ void local_overflow(const float* in, float* out, int count) {
  float local[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  const int i = blockIdx.x * 64 + threadIdx.x;
  out[i] = local[(threadIdx.x + (in[0] < 1e30f)) % 5];
}
extern "C" __global__ void integer_overflow(const float* in, float* out, int count) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  const int index = 65536 * (i + 32767 + (in[0] < 1e30f));
  out[i] = in[index >= 0 ? 0 : 1];
}
struct Ending {
  float begin;
  float last[4];
};
extern "C" __global__ void last_of_a_struct(const float* in, float* out, int count) {
  Ending ending[2] = {};
  const int i = blockIdx.x * 64 + threadIdx.x;
  out[i] = ending[0].last[(threadIdx.x + (in[0] < 1e30f)) % 5];
}
extern "C" __global__ void crash(const float* in, float* out, int count) {
  *reinterpret_cast<volatile float*>(16) = in[0];
}
"""
ENTRIES = ("clean", "heap_overflow", "shared_overflow", "local_overflow", "integer_overflow", "last_of_a_struct", "crash")


def run(entry: str, mode: Mode) -> tuple[np.ndarray, np.ndarray]:
    """Launch one kernel in a child; return its input and output."""
    library = build(CODE, {}, ENTRIES, mode)
    values = np.arange(COUNT, dtype=np.float32)
    arguments = (("in", values.tobytes(), Access.READ, True), ("out", bytes(4 * COUNT), Access.WRITE, True), ctypes.c_int(COUNT))
    out = run_isolated(library, mode, IsolatedLaunch(entry=entry, grid=(2,), block=(64,), arguments=arguments))
    return values, np.frombuffer(out["out"], np.float32)


@pytest.mark.parametrize("mode", [Mode.SANITIZER, Mode.PLAIN])
def test_clean_kernel_in_a_child_gives_its_result(mode):
    values, out = run("clean", mode)
    np.testing.assert_array_equal(out, values.reshape(2, 64)[:, ::-1].ravel())


@pytest.mark.parametrize(("entry", "reason"), [
    ("heap_overflow", r"sanitizer: heap-buffer-overflow \[kernel\.cu:12\]"),
    ("shared_overflow", r"sanitizer: (global-buffer-overflow|index 64 out of bounds for type 'float \[64\]') \[kernel\.cu:17\]"),
    ("local_overflow", r"sanitizer: (stack-buffer-overflow|index 4 out of bounds for type 'float \[4\]') \[kernel\.cu:24\]"),
    ("integer_overflow", r"sanitizer: signed integer overflow: .* \[kernel\.cu:28\]")])
def test_sanitizers_name_the_mistake_and_its_line(entry, reason):
    with pytest.raises(EmulationError, match=reason):
        run(entry, Mode.SANITIZER)


@pytest.mark.parametrize("entry", ["shared_overflow", "local_overflow", "last_of_a_struct"])
def test_the_checked_build_says_which_index_is_beyond_which_array(entry):
    """A thread's own array has no addresses that the checks know: what the mutant `i <= Batch` of split.cuh passed by, and
    `number <= streams` of experts.cu, whose array is the last of a struct."""
    values, out = run("clean", Mode.CHECKED)
    np.testing.assert_array_equal(out, values.reshape(2, 64)[:, ::-1].ravel())
    where = r"block \(\d+,0,0\) thread \(\d+,0,0\)"
    with pytest.raises(EmulationError, match=where + r": out of bounds: index \d+ of an array '\w+ \[\d+\]' \(.*:\d+\)"):
        run(entry, Mode.CHECKED)


def test_a_crash_is_reported_by_its_exit_code():
    with pytest.raises(EmulationError, match="the child process ended with code -11"):
        run("crash", Mode.PLAIN)
