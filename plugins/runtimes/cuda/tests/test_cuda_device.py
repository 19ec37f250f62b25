"""On a GPU: kernels compute, eagerly and captured, and are timed."""

import pytest
import torch
from agentcompile_cuda_kit.targets import preset, sm_number
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.ceiling import read_ceiling_gbps
from agentcompile_runtime_cuda.driver import CudaError

from agentcompile_core.plugin_api import Access, DType, Feature, Kernel, Launch, Reject, Role, StepSource, Target, f32, i32, pointer

pytestmark = pytest.mark.device

COUNT = 4096
CODE = """
#include <agentcompile/ptx.cuh>
extern "C" __global__ void axpy(const __half* x, __half* y, float factor, int n) {
  ac::launch_dependents();
  ac::grid_dependency_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = __float2half(factor * __half2float(x[i]) + __half2float(y[i]));
}
extern "C" __global__ void through_shared(const __half* x, __half* y, float factor, int n) {
  AC_DYNAMIC_SHARED(__half, staged);
  for (int i = threadIdx.x; i < n; i += blockDim.x) staged[n - 1 - i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = staged[i];
}
"""
ARGUMENTS = (pointer("x", Role.INPUT, DType.F16), pointer("y", Role.OUTPUT, DType.F16, Access.READ_WRITE),
             f32("factor", 1.0), i32("n", COUNT))
AXPY = Launch(entry="axpy", grid=(COUNT // 256, 1, 1), block=(256, 1, 1), pdl=True, arguments=ARGUMENTS)


def through_shared(shared_bytes: int) -> Launch:
    return Launch(entry="through_shared", grid=(1, 1, 1), block=(256, 1, 1), shared_bytes=shared_bytes, arguments=ARGUMENTS)


@pytest.fixture(scope="module")
def backend() -> CudaBackend:
    return CudaBackend()


@pytest.fixture(scope="module")
def target(backend: CudaBackend) -> Target:
    found = backend.live_target()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def kernel(backend: CudaBackend, target: Target) -> Kernel:
    source = StepSource(digest="device", code=CODE, launches=(AXPY, through_shared(0)))
    return backend.build(source, target)


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(COUNT, device="cuda").remainder(64).half(), torch.zeros(COUNT, device="cuda", dtype=torch.float16)


def values(x: torch.Tensor, y: torch.Tensor, factor: float = 1.0, n: int = COUNT) -> tuple[float, ...]:
    return (x.data_ptr(), y.data_ptr(), factor, n)


def test_a_backend_with_a_device_is_available(backend: CudaBackend, target: Target) -> None:
    assert backend.available() is True and backend.can_build(target) is True
    major, minor = torch.cuda.get_device_capability()
    assert sm_number(target.arch) == major * 10 + minor


@pytest.mark.parametrize("pdl", [False, True])
def test_a_kernel_computes(backend: CudaBackend, kernel: Kernel, tensors: tuple[torch.Tensor, torch.Tensor], pdl: bool) -> None:
    x, y = tensors
    run = backend.prepare_launch(backend.load(kernel), AXPY, values(x, y, 2.0), pdl)
    for _ in range(3):
        run(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert torch.equal(y, 6 * x)


@pytest.mark.parametrize("pdl", [False, True])
def test_a_kernel_is_captured_and_replayed(backend: CudaBackend, kernel: Kernel, pdl: bool,
                                           tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = tensors
    run = backend.prepare_launch(backend.load(kernel), AXPY, values(x, y), pdl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            run(torch.cuda.current_stream().cuda_stream)
    assert torch.count_nonzero(y) == 0, "capturing ran the kernel"
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, 20 * x)


def test_loading_twice_is_one_module(backend: CudaBackend, kernel: Kernel) -> None:
    assert backend.load(kernel) is backend.load(kernel)


def test_more_than_48_kb_of_shared_memory(backend: CudaBackend, kernel: Kernel,
                                          tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = tensors
    for shared_bytes in (96 << 10, 8 << 10, 64 << 10):
        y.zero_()
        backend.prepare_launch(backend.load(kernel), through_shared(shared_bytes), values(x, y), False)(0)
        torch.cuda.synchronize()
        assert torch.equal(y, x.flip(0))


def test_a_binary_for_another_architecture_is_an_error(backend: CudaBackend, target: Target) -> None:

    other = preset("a100" if target.has(Feature.BULK_COPY) else "b200")
    built = backend.build(StepSource(digest="other", code=CODE, launches=(AXPY,)), other)
    with pytest.raises(CudaError, match="loading a kernel binary"):
        backend.load(built)


def test_times_are_plausible_and_scale(backend: CudaBackend, kernel: Kernel, tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = tensors
    small = backend.prepare_launch(backend.load(kernel), AXPY, values(x, y, 0.0), False)
    times = backend.time(small, repetitions=20, runs_per_repetition=50)
    assert not isinstance(times, Reject) and len(times) == 20 and all(0.3 < us < 50 for us in times)
    big = torch.zeros(1 << 28, device="cuda", dtype=torch.int64)
    slow = backend.time(lambda stream: big.add_(1), repetitions=5, runs_per_repetition=2)
    assert not isinstance(slow, Reject)
    moved_gbps = [2 * big.nbytes / us / 1e3 for us in slow]
    assert all(20 < gbps < 20_000 for gbps in moved_gbps)


def test_work_that_cannot_be_captured_is_rejected_and_the_device_stays_usable(backend: CudaBackend) -> None:
    answer = backend.time(lambda stream: torch.cuda.synchronize(), repetitions=2, runs_per_repetition=2)
    assert isinstance(answer, Reject) and "cannot be captured" in answer.reason
    assert int(torch.ones(10, device="cuda").sum()) == 10


def test_the_read_ceiling_is_near_the_datasheet(target: Target) -> None:
    assert 0.5 * target.memory_gbps < read_ceiling_gbps() < 1.02 * target.memory_gbps


def test_the_backend_waits_times_and_identifies_itself(backend: CudaBackend) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert backend.stream() == side.cuda_stream
    buffer = torch.zeros(1 << 20, device="cuda")
    times = backend.time_from_host(lambda stream: buffer.add_(1.0), repetitions=3, runs_per_repetition=5)
    assert len(times) == 3 and all(0.0 < t < 1e5 for t in times)
    backend.synchronize()
    assert float(buffer[0]) == 15.0 and not backend.is_lost()
    assert torch.cuda.get_device_name() in backend.identity() and torch.__version__ in backend.identity()
