"""What prompts of most models need is being built before they are read: nothing else is built when they are."""

import hashlib
import threading
import weakref
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda import ahead, own_kernels
from agentcompile_runtime_cuda.ahead import Ahead
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.gates import GATES
from row_cases import HALVES
from row_cases import rows as rows

from agentcompile_core.installation.building import stored_or_built
from agentcompile_core.ir.candidate import Resources
from agentcompile_core.ops import operators  # noqa: F401  registers what the framework computes
from agentcompile_core.plugin_api import DType, Kernel, StepSource, Target, operator_names
from agentcompile_core.store import Store
from agentcompile_core.testing.doubles import FakeBackend, fake_source


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of what was begun or asked for, in order."""
    found: list[str] = []
    build_once = own_kernels.build_once

    def noted(backend: Any, source: Any, target: Any) -> Any:
        found.append(source.digest)
        return build_once(backend, source, target)

    monkeypatch.setattr(own_kernels, "build_once", noted)
    return found


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend takes the host for an H200, and has built nothing of its own."""
    monkeypatch.setattr(own_kernels, "_builds", {})
    monkeypatch.setattr(CudaBackend, "device", "cpu")
    monkeypatch.setattr(CudaBackend, "live_target", lambda self: preset("h200"))


@pytest.mark.parametrize("dtype", HALVES)
def test_what_was_begun_is_what_prompts_ask_for(rows: Any, begun: list[str], dtype: torch.dtype) -> None:
    rows.start(torch.empty(0, dtype=dtype))
    ahead = set(begun)
    begun.clear()
    x, weight, square = (torch.ones(*size, dtype=dtype) for size in ((1, 3, 64), (64,), (64, 64)))
    assert rows.body(operator_names.RMS_NORM)(x, weight, 1e-6) is not None
    few_rows = rows.body(operator_names.LINEAR)
    made = [few_rows(torch.ones(1, count, 64, dtype=dtype), square) for count in (2, 3, 8)]
    assert any(one is not None for one in made)
    assert len(set(begun)) > 1 and set(begun) <= ahead


def test_nothing_of_half_precision_is_begun_for_float32(rows: Any, begun: list[str]) -> None:
    rows.start(torch.empty(0))
    assert set(begun) == {rows._kernels._of(torch.empty(0)).digest}


def test_the_backend_begins_at_once_and_only_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, begun, never = CudaBackend(), list[tuple[str, str]](), Future[Any]()
    monkeypatch.setattr(own_kernels, "build_once", lambda backend, source, target: begun.append((source.digest, target.name)) or never)
    monkeypatch.setattr(CudaBackend, "device", "cpu")
    backend.expect(DType.F16, unasked)
    assert not begun
    monkeypatch.setattr(CudaBackend, "live_target", lambda self: preset("h200"))
    made = CudaBackend()
    for dtype in (DType.F16, DType.BF16):
        made.expect(dtype, unasked)
    made._ahead.wait()
    assert len(begun) == len(set(begun)) and {name for _, name in begun} == {"h200"}
    one = made._rows._product._kernels[GATES[0]]._of(torch.empty(0, dtype=torch.float16)).digest
    heads = {kernels._of(torch.empty(0, dtype=torch.bfloat16)).digest for kernels in made._rows._others[0].__self__._kernels.values()}
    assert one in dict(begun) and heads <= set(dict(begun))
    assert len(heads) == 4, "of 64 and of 128 channels, each in both of its shapes"


def unasked(*_: object) -> Any:
    raise AssertionError("nothing is to be built")


@pytest.mark.usefixtures("as_on_a_gpu")
def test_kernels_of_its_own_come_from_the_store_once_they_were_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    builds: list[str] = []

    def build(self: CudaBackend, source: StepSource, target: Target, deadline_s: float = 120.0) -> Kernel:
        builds.append(source.digest)
        binary = source.digest.encode()
        return Kernel(digest=source.digest, backend=self.name, arch=target.arch, binary=binary,
                      sha256=hashlib.sha256(binary).hexdigest(), compiler=self.compiler(), resources=Resources(), build_s=0.0)

    monkeypatch.setattr(CudaBackend, "build", build)
    made: list[dict[str, bytes]] = []
    for _ in range(2):  # as in two processes
        monkeypatch.setattr(own_kernels, "_builds", {})
        backend = CudaBackend()
        store = Store(tmp_path)
        backend.expect(DType.F16, partial(stored_or_built, weakref.ref(store)))
        backend._ahead.wait()
        made.append({kernel.digest: kernel.binary for kernel in (future.result() for future in own_kernels._builds.values())})
    assert made[0] == made[1] and sorted(builds) == sorted(made[0]) and len(builds) > 3


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_store_that_fails_is_told_to_who_needs_the_kernel() -> None:
    backend = CudaBackend()
    backend.expect(DType.F16, unasked)
    backend._ahead.wait()
    assert own_kernels._builds
    for future in list(own_kernels._builds.values()):
        with pytest.raises(AssertionError, match="nothing is to be built"):
            future.result()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_capture_waits_until_nothing_else_uses_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, order = threading.Event(), list[str]()

    def slowly(dtype: torch.dtype, device: torch.device) -> None:
        may_end.wait()
        order.append("libraries")

    monkeypatch.setattr(ahead, "use_libraries", slowly)
    monkeypatch.setattr(own_kernels, "build_once", lambda *_: Future())
    backend = CudaBackend()
    backend.expect(DType.F16, unasked)
    monkeypatch.setattr(backend._captures, "_place", lambda owner: order.append("capture"))
    threading.Timer(0.2, may_end.set).start()
    with pytest.raises(TypeError):  # there is no stream to capture on
        backend._captures(lambda: None, warm_ups=0, runs=1, owner=None)
    assert order == ["libraries", "capture"]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_everyone_who_captures_waits_also_behind_an_interruption() -> None:
    begun, may_end = Ahead(CudaBackend()), threading.Event()
    begun.begin(torch.float16, unasked, lambda like: may_end.wait() and None)
    interrupted = begun._thread
    assert interrupted is not None

    class Interrupting:
        def join(self) -> None:
            raise KeyboardInterrupt

    begun._thread = Interrupting()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        begun.wait()
    assert isinstance(begun._thread, Interrupting), "the next one waits, too"
    begun._thread = interrupted
    waiting = [threading.Thread(target=begun.wait) for _ in range(2)]
    for one in waiting:
        one.start()
    for one in waiting:
        one.join(0.1)
        assert one.is_alive()
    may_end.set()
    for one in waiting:
        one.join(10)
        assert not one.is_alive()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_without_another_thread_kernels_are_refused_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    backend = CudaBackend()
    monkeypatch.setattr(threading.Thread, "start", full)
    with pytest.raises(RuntimeError, match="new thread"):
        backend.expect(DType.F16, unasked)
    backend._ahead.wait()
    made = backend._rows._kernels._of(torch.empty(0, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="new thread"):
        own_kernels.build_once(backend, made, preset("h200")).result(5)


def test_a_kernel_that_cannot_be_stored_is_used_and_one_without_a_store_is_built() -> None:
    class Full(Store):
        def put_kernel(self, key: str, kernel: Kernel) -> None:
            raise MemoryError

    source, backend, full = fake_source("honest"), FakeBackend(), Full(None)
    assert stored_or_built(weakref.ref(full), backend, source, preset("h200")).digest == source.digest
    gone = weakref.ref(full)
    del full
    assert gone() is None
    assert stored_or_built(gone, backend, source, preset("h200")).digest == source.digest and backend.builds == 2


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_what_is_used_ahead_runs_and_leaves_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    ahead.use_libraries(dtype, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
