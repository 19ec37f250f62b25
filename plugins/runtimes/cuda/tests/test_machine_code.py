"""Static checks on machine code: a dependency wait where a launch may start early, and what the compiler keeps outside of registers."""

import hostile_kernels as hostile
import pytest
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda import machine_code, ptxas
from agentcompile_runtime_cuda.backend import CudaBackend

from agentcompile_core.errors import Cause
from agentcompile_core.plugin_api import Access, BuildError, DType, Launch, Role, StepSource, i32, pointer
from agentcompile_core.worker.causes import build_cause

CODE = """
#include <agentcompile/ptx.cuh>
HELPER
extern "C" __global__ void twice(const float* x, float* y, int n) {
  ac::launch_dependents();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  WAIT
  if (i < n) y[i] = 2.0f * x[i];
}
"""
ARGUMENTS = (pointer("x", Role.INPUT, DType.F32), pointer("y", Role.OUTPUT, DType.F32, Access.WRITE), i32("n", 100))
CALLED = "__device__ __noinline__ void waits(float* y) { ac::grid_dependency_wait(); y[0] = 1.0f; }"


def source(wait: str, pdl: bool = True, helper: str = "") -> StepSource:
    launch = Launch(entry="twice", grid=(1, 1, 1), block=(128, 1, 1), pdl=pdl, arguments=ARGUMENTS)
    return StepSource(digest="d", code=CODE.replace("WAIT", wait).replace("HELPER", helper), launches=(launch,))


@pytest.mark.compile
@pytest.mark.parametrize("target", ["h200", "b200", "rtx5090"])
@pytest.mark.parametrize("wait, helper", [("ac::grid_dependency_wait();", ""), ("if (n > 5) ac::grid_dependency_wait();", ""),
                                          ("waits(y);", CALLED)], ids=["always", "sometimes", "called"])
def test_a_kernel_that_waits_is_built(target: str, wait: str, helper: str) -> None:
    assert CudaBackend().build(source(wait, helper=helper), preset(target)).binary


@pytest.mark.compile
@pytest.mark.parametrize("target", ["h200", "b200", "rtx5090"])
def test_a_kernel_that_may_start_early_and_never_waits_is_refused(target: str) -> None:
    with pytest.raises(BuildError, match=r"twice is launched before .* \(pdl\), and its machine code never waits") as refused:
        CudaBackend().build(source(""), preset(target))
    assert build_cause(str(refused.value)) is Cause.CONTRACT
    assert CudaBackend().build(source("", pdl=False), preset(target)).binary


@pytest.mark.compile
def test_where_nothing_starts_early_nothing_needs_to_wait() -> None:
    assert CudaBackend().build(source(""), preset("a100")).binary


@pytest.mark.compile
@pytest.mark.parametrize("target", ["h200", "b200", "rtx5090"])
@pytest.mark.parametrize("copies", [0, 1, 3])
def test_every_bulk_copy_is_found_and_nothing_else(target: str, copies: int) -> None:
    staged = " ".join(f"if (threadIdx.x == 0) ac::bulk_copy_to_shared(staged + {32 * i}, x + {64 * i}, 128, &full);" for i in range(copies))
    setup = "alignas(128) __shared__ float staged[96]; __shared__ ac::Mbarrier full; if (threadIdx.x == 0) ac::mbarrier_init(&full, 1);"
    made = source(f"{setup} __syncthreads(); {staged} ac::mbarrier_wait(&full, 0); y[i] = staged[threadIdx.x % 96];", pdl=False)
    found = machine_code.bulk_copies(CudaBackend().build(made, preset(target)).binary)
    assert len(found) == copies and {name for name, _ in found} <= {"twice"}


@pytest.mark.parametrize("binary", [b"", b"\x7fELF", b"text of a program" * 9, b"\x7fELF" + b"\xff" * 200])
def test_what_is_no_binary_is_refused(binary: bytes) -> None:
    with pytest.raises(BuildError, match="cannot be read"):
        machine_code.functions(binary)


@pytest.mark.compile
def test_local_memory_is_reported() -> None:
    array = "float a[64]; for (int j = 0; j < n; ++j) a[j % 64] = x[j]; y[0] = a[n % 64];"
    plain = CudaBackend().build(source("", pdl=False), preset("h200")).resources
    assert (plain.spill_bytes, plain.local_bytes) == (0, 0)
    assert CudaBackend().build(source(array, pdl=False), preset("h200")).resources.local_bytes >= 256


@pytest.mark.compile
@pytest.mark.parametrize("name", ["too much shared memory", "never waits"])
def test_hostile_kernels_that_never_run_are_refused_where_they_are_built(name: str) -> None:
    target = preset("h200")
    with pytest.raises(BuildError) as refused:
        CudaBackend().build(hostile.source(name), target)
    expected = hostile.HOSTILE[name]
    assert expected.message in str(refused.value) and build_cause(str(refused.value)) in expected.causes, str(refused.value)


@pytest.mark.compile
def test_hostile_kernels_that_run_are_built() -> None:
    for name in (*hostile.HOSTILE, "honest"):
        if name not in ("too much shared memory", "never waits"):
            assert CudaBackend().build(hostile.source(name), preset("h200")).binary


def test_figures_of_spills_and_the_stack_are_read_from_the_log() -> None:
    log = ("ptxas info    : Compiling entry function 'k' for 'sm_90'\nptxas info    : Function properties for k\n"
           "    112 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads\n"
           "ptxas info    : Used 32 registers, 128 bytes smem, 400 bytes cmem[0]\n")
    assert ptxas.parse(log) == {"k": ptxas.EntryResources(registers=32, static_shared_bytes=128, spill_bytes=84, local_bytes=112)}
