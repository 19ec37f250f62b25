"""A captured program survives whoever clears torch's cuBLAS workspaces and caches afterwards, as torch.compile does."""

import gc

import pytest
import torch
from agentcompile_runtime_cuda.backend import CudaBackend

from agentcompile_core.plugin_api import Reject


class Owner:
    pass


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replays_own_their_workspaces() -> None:
    a, b = torch.randn(256, 512, device="cuda").half(), torch.randn(512, 384, device="cuda").half()
    out = torch.empty(256, 384, device="cuda", dtype=torch.half)
    replay = CudaBackend().capture(lambda: torch.mm(a, b, out=out), warm_ups=2, owner=Owner())
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    fillers = [torch.full((1 << 22,), 7.0, device="cuda") for _ in range(8)]
    replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, a @ b)
    assert all(bool((f == 7.0).all()) for f in fillers), "a replay wrote to memory that is no longer its own"


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_that_are_garbage_do_not_end_a_capture() -> None:
    """A graph in a circle is destroyed by whichever collection finds it; CUDA refuses that while anything is captured."""
    x, out, backend = torch.ones(64, device="cuda"), torch.empty(64, device="cuda"), CudaBackend()
    thresholds = gc.get_threshold()
    try:
        for _ in range(3):
            circle: list[object] = [backend.capture(lambda: torch.add(x, 1.0, out=out), owner=Owner())]
            circle.append(circle)
            del circle
            gc.set_threshold(1, 1, 1)
            replay = backend.capture(lambda: (torch.mul(x, 2.0, out=out), [[] for _ in range(1000)]), owner=Owner())
            gc.set_threshold(*thresholds)
            assert not isinstance(replay, Reject), replay.reason
            out.zero_()
            replay()
            assert torch.equal(out, 2.0 * x)
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("owner", [None, Owner()], ids=["passing", "kept"])
def test_memory_is_given_back_behind_captures_that_failed(owner: object) -> None:
    """torch before 2.12 takes the process for capturing then, and gives nothing back any more."""
    backend, x, nbytes = CudaBackend(), torch.ones(64, device="cuda"), 256 << 20
    for _ in range(3):
        assert isinstance(backend.capture(lambda: x.sum().item(), owner=owner), Reject)
        room = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        del room
        before = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before - nbytes
    other = torch.cuda.Stream()
    held = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    held.record_stream(other)
    del held  # who looks at its event must not take the process for capturing
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    replay = backend.capture(lambda: x.add_(1.0), owner=owner)
    assert not isinstance(replay, Reject), replay.reason
    x.zero_()
    replay()
    assert float(x.sum()) == 64.0


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_owner_captures_again_behind_a_capture_that_failed() -> None:
    x, out, backend, owner = torch.ones(64, device="cuda"), torch.empty(64, device="cuda"), CudaBackend(), Owner()
    assert isinstance(backend.capture(lambda: torch.add(x, float(x.sum().item()), out=out), owner=owner), Reject)
    replay = backend.capture(lambda: torch.add(x, 3.0, out=out), owner=owner)
    assert not isinstance(replay, Reject), replay.reason
    replay()
    assert torch.equal(out, x + 3.0)
