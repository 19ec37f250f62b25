"""Masks and biases that a model keeps or makes itself: read as windows and slopes, or refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from attrs import evolve
from capture_models import SIZES, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from agentcompile_core.ir.graph import DType, GraphKind, Workload
from agentcompile_core.ops.schema import argument
from agentcompile_core.plugin.interfaces import LoadedModel
from agentcompile_core.runtime.generation.cache_name import CACHE_NAME
from agentcompile_core.stages.capture.comparison import difference
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.stages.capture.own_scores import _slopes, _window

LENGTH, LOW = 16, torch.finfo(torch.float32).min
WORKLOAD = Workload(dtype=DType.F32, max_context=LENGTH, prefill_chunks=(4,))
POSITIONS = torch.arange(64)
CAUSAL = POSITIONS[None] <= POSITIONS[:, None]
BACK = POSITIONS[None] - POSITIONS[:, None]
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.03])


@settings(max_examples=60, deadline=None)
@given(length=st.integers(2, 24), count=st.integers(1, 24), window=st.integers(1, 30), causal=st.booleans())
def test_a_window_is_read_from_its_mask(length: int, count: int, window: int, causal: bool) -> None:
    rows = torch.arange(length)[-min(count, length):, None]
    columns = torch.arange(length)[None]
    seen = (columns > rows - window) & ((columns <= rows) if causal else torch.tensor(True))
    found = _window(seen)
    assert found is not None
    wanted = (columns > rows - found[0]) if found[0] else torch.ones_like(seen)
    assert torch.equal(seen & (columns <= rows), wanted & (columns <= rows))
    assert not found[1] or torch.equal(seen, wanted & (columns <= rows))


@settings(max_examples=60, deadline=None)
@given(slopes=st.lists(st.floats(-2.0, 2.0, width=32), min_size=1, max_size=6), length=st.integers(2, 40), shift=st.integers(-50, 50),
       bent=st.booleans())
def test_slopes_are_read_from_lines_alone(slopes: list[float], length: int, shift: int, bent: bool) -> None:
    lines = torch.tensor(slopes, dtype=torch.float64)[:, None, None] * (torch.arange(length) + shift)
    if bent and length > 2:
        lines[-1, 0, -1] += 0.01 + lines.abs().max()
        assert _slopes(lines, (len(slopes), 1, length)) is None
    else:
        assert _slopes(lines, (1, len(slopes), 1, length)) == pytest.approx(slopes, abs=1e-6)


class Written(nn.Module):
    """Attention of a Llama layer that writes its scores out; ``change`` makes of scores [1, H, T, S] and rows what it adds and hides."""

    def __init__(self, original: Any, change: Callable[["Written", Tensor, int, int], Tensor]) -> None:
        super().__init__()
        self.original, self.change, self.layer = original, change, original.layer_idx
        self.register_buffer("mask", CAUSAL, persistent=False)
        self.register_buffer("window", CAUSAL & (BACK > -5), persistent=False)
        self.register_buffer("blocks", CAUSAL & (POSITIONS[None] // 5 == POSITIONS[:, None] // 5), persistent=False)
        self.register_buffer("slopes", SLOPES, persistent=False)

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **others: Any) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, 8)
        q, k, v = (getattr(self.original, f"{name}_proj")(hidden_states).view(shape).transpose(1, 2) for name in "qkv")
        cache = others.get(CACHE_NAME)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        scores = self.change(self, q @ k.transpose(2, 3) / math.sqrt(8), k.shape[2] - q.shape[2], k.shape[2])
        if attention_mask is not None:
            scores = scores + attention_mask
        out = F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v
        return self.original.o_proj(out.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)), None


def written(change: Callable[[Written, Tensor, int, int], Tensor]) -> nn.Module:
    model: Any = tiny("llama", {**SIZES, "num_key_value_heads": 4})
    for layer in model.model.layers:
        layer.self_attn = Written(layer.self_attn, change)
    return model


def part(kept: Tensor, first: int, length: int) -> Tensor:
    return kept[None, None, first:length, :length]


UNDERSTOOD: dict[str, tuple[Callable[[Written, Tensor, int, int], Tensor], int, bool]] = {
    "kept mask": (lambda m, s, first, n: torch.where(part(m.mask, first, n), s, torch.tensor(LOW)), 0, False),
    "kept window": (lambda m, s, first, n: torch.where(part(m.window, first, n), s, LOW), 5, False),
    "filled window": (lambda m, s, first, n: s.masked_fill(~part(m.window, first, n), LOW), 5, False),
    "slopes": (lambda m, s, first, n: s + m.slopes[:, None, None] * torch.arange(n), 0, True),
    "slopes first": (lambda m, s, first, n: m.slopes[:, None, None] * torch.arange(1 - n, 1) + s, 0, True),
    "slopes scaled": (lambda m, s, first, n: (s + 2.0 * m.slopes[:, None, None] * torch.arange(n)) / 2.0, 0, True),
    "slopes by row": (lambda m, s, first, n: s + m.slopes[:, None, None] * (torch.arange(n) - torch.arange(first, n)[:, None]), 0, True),
    "both": (lambda m, s, first, n: torch.where(part(m.window, first, n), s + m.slopes[:, None, None] * torch.arange(n), LOW), 5, True),
}
REFUSED: dict[str, Callable[[Written, Tensor, int, int], Tensor]] = {
    "blocks": lambda m, s, first, n: torch.where(part(m.blocks, first, n), s, LOW),
    "faint": lambda m, s, first, n: torch.where(part(m.window, first, n), s, -5.0),
    "curve": lambda m, s, first, n: s + m.slopes[:, None, None] * torch.arange(n).float().sqrt(),
    "of the scores": lambda m, s, first, n: s + 0.1 * s.abs(),
    "a parameter": lambda m, s, first, n: s + m.original.q_proj.weight[0, 0] * torch.arange(n),
    "shrunk": lambda m, s, first, n: torch.where(part(m.window, first, n), s, LOW) * 1e-40,
    "upside down": lambda m, s, first, n: torch.where(part(m.window, first, n), s, LOW) * -1.0,
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_what_is_understood_reaches_the_operator(name: str) -> None:
    change, window, sloping = UNDERSTOOD[name]
    graphs = capture_language_model(written(change), name, WORKLOAD)
    assert graphs.eager_reason == ""
    for graph in graphs.graphs:
        for node in (node for node in graph.nodes if node.kind == "attention"):
            assert argument(node, "window") == window
            assert (argument(node, "slopes") or ()) == (tuple(SLOPES.tolist()) if sloping else ())
    assert len([n for n in graphs.of_kind(GraphKind.DECODE)[0].nodes if n.kind == "attention"]) == 2


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_refuses(name: str) -> None:
    graphs = capture_language_model(written(REFUSED[name]), name, WORKLOAD)
    assert graphs.graphs == () and "not understood" in graphs.eager_reason


def test_a_kept_mask_without_data_refuses() -> None:
    model = written(UNDERSTOOD["kept window"][0]).to("meta")
    assert "not understood" in capture_language_model(model, "meta", WORKLOAD).eager_reason


def test_a_kept_mask_of_a_model_without_weights_is_what_its_initialization_makes() -> None:
    config = transformers.AutoConfig.for_model("gpt_neo", vocab_size=128, hidden_size=32, num_layers=2, num_heads=4, window_size=5,
                                               attention_types=[[["global", "local"], 1]], max_position_embeddings=64)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    graphs = capture_language_model(model, "gpt_neo", WORKLOAD)
    calls = [node for node in graphs.of_kind(GraphKind.DECODE)[0].nodes if node.kind == "attention"]
    assert [argument(node, "window") for node in calls] == [0, 5]


class Rotated(Written):
    """Queries that are turned in float32, as by tables of float32, beside keys that are cached in the type of the model."""

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **others: Any) -> tuple[Tensor, None]:
        shape, table = (*hidden_states.shape[:-1], -1, 8), self.slopes.repeat(2).float() + 0.7
        q, k, v = (getattr(self.original, f"{name}_proj")(hidden_states).view(shape).transpose(1, 2) for name in "qkv")
        q, k = q * table, (k * table).to(k.dtype)
        cache = others.get(CACHE_NAME)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        scores = self.change(self, q @ k.float().transpose(2, 3) / math.sqrt(8), k.shape[2] - q.shape[2], k.shape[2])
        if attention_mask is not None:
            scores = scores + attention_mask
        out = F.softmax(scores, dim=-1).to(v.dtype) @ v
        return self.original.o_proj(out.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)), None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_that_are_wider_than_what_is_cached_are_rounded_to_it(dtype: torch.dtype) -> None:
    model: Any = tiny("llama", {**SIZES, "num_key_value_heads": 4}, dtype)
    for layer in model.model.layers:
        layer.self_attn = Rotated(layer.self_attn, UNDERSTOOD["kept mask"][0])
    graphs = capture_language_model(model, "m", evolve(WORKLOAD, dtype=DType(str(dtype).removeprefix("torch."))))
    assert not graphs.eager_reason
    assert all(any(node.kind == "attention" for node in graph.nodes) for graph in graphs.graphs)
    assert difference(graphs, LoadedModel(module=model, name="m")) == ""
