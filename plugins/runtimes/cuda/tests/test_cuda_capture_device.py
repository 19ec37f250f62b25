"""A captured program survives whoever clears torch's cuBLAS workspaces and caches afterwards, as torch.compile does."""

import pytest
import torch
from agentcompile_runtime_cuda.backend import CudaBackend


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
