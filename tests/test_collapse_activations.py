"""Activations written out are one operator, however they are written; what is another function, or is read on the way, stays."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_capture_normalize import forward_graph, kinds, run
from torch import Tensor, nn
from transformers.activations import ACT2FN

from agentcompile_core.ops.schema import argument
from agentcompile_core.stages.capture.normalize import normalize

MORE = settings(max_examples=40, derandomize=True, database=None, deadline=None, phases=(Phase.generate,))
CUBES: dict[str, Callable[[Tensor], Tensor]] = {"pow": lambda x: torch.pow(x, 3.0), "product": lambda x: x * x * x,
                                                "square": lambda x: x * x.square()}
ROOT = math.sqrt(2 / math.pi)


class Behind(nn.Module):
    """A function behind a linear layer, and something behind it."""

    def __init__(self, function: Callable[[Tensor], Any], width: int = 8) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(width, width), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.inner(x))


def captured(function: Callable[[Tensor], Any], dtype: torch.dtype = torch.float32) -> tuple[Any, nn.Module, Tensor]:
    torch.manual_seed(1)
    module, x = Behind(function).to(dtype).requires_grad_(False), (torch.randn(3, 8) * 3).to(dtype)
    return normalize(forward_graph(module, x)), module, x


@MORE
@given(cube=st.sampled_from(sorted(CUBES)), root=st.sampled_from([ROOT, 0.79788456, 0.7978845608]), dtype=st.sampled_from(
    [torch.float32, torch.float16, torch.bfloat16]), half=st.sampled_from(["before", "behind", "divided"]), nested=st.booleans())
def test_a_tangent_gelu_is_found_in_any_writing(cube: str, root: float, dtype: torch.dtype, half: str, nested: bool) -> None:
    def gelu(x: Tensor) -> Tensor:
        inner = root * x * (1 + 0.044715 * (x * x)) if nested else root * (x + 0.044715 * CUBES[cube](x))
        bent = 1.0 + torch.tanh(inner)
        return 0.5 * x * bent if half == "before" else x * (bent * 0.5) if half == "behind" else (x * bent) / 2

    graph, module, x = captured(gelu, dtype)
    (found,) = (node for node in graph.nodes if node.kind == "gelu")
    assert argument(found, "approximate") == "tanh" and set(kinds(graph)) == {"linear", "gelu"}
    exactly = F.gelu(module.inner(x).double(), approximate="tanh")
    ours, theirs = (float((one.double() - exactly).abs().max()) for one in (run(graph, module, x), module(x)))
    assert ours <= theirs + torch.finfo(dtype).eps * 1e-3 * float(exactly.abs().max())


@pytest.mark.parametrize("name, kind, approximate", [
    ("gelu_new", "gelu", "tanh"), ("gelu_fast", "gelu", "tanh"), ("gelu_accurate", "gelu", "tanh"), ("gelu_python", "gelu", "none")])
def test_activations_of_transformers(name: str, kind: str, approximate: str) -> None:
    graph, module, x = captured(ACT2FN[name])
    (found,) = (node for node in graph.nodes if node.kind == kind)
    assert argument(found, "approximate") == approximate and set(kinds(graph)) == {"linear", kind}
    torch.testing.assert_close(run(graph, module, x), module(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("silu", [lambda x: x * torch.sigmoid(x), lambda x: x / (1 + torch.exp(-x)), lambda x: torch.sigmoid(x) * x])
def test_silu(silu: Callable[[Tensor], Tensor]) -> None:
    graph, module, x = captured(silu)
    assert set(kinds(graph)) == {"linear", "silu"}
    torch.testing.assert_close(run(graph, module, x), module(x), rtol=1e-5, atol=1e-6)


def _tangent(x: Tensor, factor: float = 0.044715) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(ROOT * (x + factor * x**3)))


@pytest.mark.parametrize("name, function", [
    ("another constant", lambda x: _tangent(x, 0.044725)), ("a sigmoid for it", lambda x: x * torch.sigmoid(1.702 * x)),
    ("another tensor in it", lambda x: 0.5 * x.flip(0) * (1 + torch.tanh(ROOT * (x + 0.044715 * x**3)))),
    ("cut off", lambda x: torch.clamp(x, -2) * torch.sigmoid(torch.clamp(x, -2))),
    ("cut off far away", lambda x: torch.clamp(x, max=20000) * torch.sigmoid(x)),
    ("a step near 0", lambda x: x * torch.sigmoid(x) + 1e-3 * (x.abs() < 1e-4)),
    ("nothing where it is large", lambda x: torch.where(x > 1e20, 0 * x, x * torch.sigmoid(x)))])
def test_other_functions_stay(name: str, function: Callable[[Tensor], Tensor]) -> None:
    graph, module, x = captured(function)
    last = graph.producer[graph.outputs[0]]
    assert last.kind not in ("gelu", "silu"), name
    with torch.no_grad():
        module.inner.bias.copy_(torch.tensor([3e4, -3e4, 0.0, 1e30, -1e30, 1e-5, 3.0, -3.0]))
    torch.testing.assert_close(run(graph, module, x), module(x), rtol=1e-6, atol=1e-6)


def test_what_is_read_on_the_way_stays() -> None:
    def function(x: Tensor) -> Tensor:
        bent = torch.tanh(ROOT * (x + 0.044715 * x**3))
        return 0.5 * x * (1 + bent) + bent.sum()

    graph, module, x = captured(function)
    assert kinds(graph)["tanh"] == 1 and "gelu" not in kinds(graph)
    assert torch.equal(run(graph, module, x), module(x))


def test_what_is_written_on_the_way_stays() -> None:
    """Where the example writes nothing."""
    class Masked(nn.Module):
        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            hidden = x * 1.5
            bent = torch.tanh(ROOT * (hidden + 0.044715 * hidden**3))
            hidden.view(-1, 8).masked_fill_(padding, 1.0)
            return 0.5 * hidden * (1 + bent)

    module, x = Masked(), torch.randn(3, 8)
    graph = normalize(forward_graph(module, x, torch.zeros(3, 1, dtype=torch.bool)))
    padding = torch.tensor([[True], [False], [True]])
    assert torch.equal(run(graph, module, x.clone(), padding), module(x, padding))


def test_float64_keeps_every_digit() -> None:
    graph, module, x = captured(_tangent, torch.float64)
    assert kinds(graph)["tanh"] == 1 and torch.equal(run(graph, module, x), module(x))
