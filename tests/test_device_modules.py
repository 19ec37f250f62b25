"""On a GPU: a compiled module reads its caller's memory, on any stream, also where the caller records a graph of his own."""

from functools import partial

import pytest
import torch
from module_ways import WAYS, put
from torch import Tensor, nn

import agentcompile_core as ac
from agentcompile_core.api import CompiledModel
from agentcompile_core.configuration import Config
from agentcompile_core.installation.install import capturing
from agentcompile_core.store import Store

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROWS, WIDTH = 1024, 4096  # beyond 64 MiB of inputs and results nothing is replayed


class Steps(nn.Module):
    """Three steps, so that values lie in the program's own memory between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.norm(torch.nn.functional.softsign(x) * 3.0), -1)


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return Steps().cuda().eval()


@pytest.fixture(scope="module")
def made(module: nn.Module) -> CompiledModel:
    made = ac.compile(module, example_inputs=(torch.randn(ROWS, WIDTH, device="cuda"),), store=Store(None),
                      config=Config(budget_s=30.0, budget_plans=12, rounds=1))
    assert any(s.source for s in made.session.program.segments), made.notes
    return made


@pytest.fixture(scope="module", params=WAYS)
def compiled(made: CompiledModel, module: nn.Module, request: pytest.FixtureRequest) -> CompiledModel:
    """In each of the ways in which calls can run, whichever was found to be the fastest."""
    backend = capturing("cuda", made.context)
    assert backend is not None
    capture = partial(backend.capture, owner=made.session)
    put(made.session, module, request.param, capture)
    return made


def wanted(module: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return module(x)


def test_no_byte_is_copied(compiled: CompiledModel, module: nn.Module) -> None:
    if compiled.session.runs_itself:
        pytest.skip("what the framework's operators take is theirs")
    x = torch.randn(ROWS, WIDTH, device="cuda")
    compiled(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = compiled(x)
    assert torch.cuda.max_memory_allocated() - before <= found.nbytes + (1 << 20)
    assert torch.allclose(found, wanted(module, x), atol=1e-6)


def test_calls_on_several_streams_do_not_disturb_each_other(compiled: CompiledModel, module: nn.Module) -> None:
    inputs = [torch.randn(ROWS, WIDTH, device="cuda") for _ in range(6)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for i, x in enumerate(inputs * 3):
        with torch.cuda.stream(streams[i % 3]):
            found.append(compiled(x))
    torch.cuda.synchronize()
    for i, one in enumerate(found):
        assert torch.allclose(one, wanted(module, inputs[i % 6]), atol=1e-6)


def test_a_caller_may_record_it_in_a_graph_of_his_own(compiled: CompiledModel, module: nn.Module) -> None:
    place = torch.randn(ROWS, WIDTH, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compiled(place)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compiled(place)
    for seed in range(3):
        torch.manual_seed(seed)
        place.copy_(torch.randn(ROWS, WIDTH, device="cuda"))
        graph.replay()
        assert torch.allclose(result, wanted(module, place), atol=1e-6)


def test_layouts_and_devices_give_what_the_module_gives(compiled: CompiledModel, module: nn.Module) -> None:
    x = torch.randn(ROWS, WIDTH)
    odd = torch.cat([torch.zeros(1), x.flatten()]).cuda()[1:].view(ROWS, WIDTH)
    for given in (x, odd, x.cuda().t().contiguous().t(), torch.stack([x, x], -1).cuda()[..., 0]):
        assert torch.allclose(compiled(given), wanted(module, given.cuda()), atol=1e-6)
