"""K and V that a model computes from what it caches are cached instead, where each position is on its own, and refused elsewhere."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_models import SIZES, generate, greedy, tiny
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.runtime.generation.cache_name import CACHE_NAME
from agentcompile_core.stages.capture.language_model import capture_language_model

WORKLOAD = Workload(dtype=DType.F32, max_context=32, prefill_chunks=(8,))
PROMPT = torch.tensor([[3, 17, 90, 4, 55, 21, 8, 100, 63, 2, 41]])
Change = Callable[["Deriving", Tensor, Tensor], tuple[Tensor, Tensor]]


def plain(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> tuple[Tensor, None]:
    """Causal attention of the last rows, with as many heads as Q has."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scaling
    rows = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
    hidden = torch.arange(k.shape[2])[None] > rows
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(1, 2), None


class Deriving(nn.Module):
    """Attention of a Llama layer that computes K and V by ``change`` from what its cache hands out."""

    def __init__(self, original: Any, change: Change) -> None:
        super().__init__()
        self.original, self.change, self.layer, self.config = original, change, original.layer_idx, original.config
        self.up = nn.Linear(8, 8, bias=False)
        self.narrow = nn.Linear(8, 4, bias=False)
        self.wide = nn.Linear(4 * 4, 32, bias=False)
        self.is_causal = True

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **others: Any) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, 8)
        q, k, v = (getattr(self.original, f"{name}_proj")(hidden_states).view(shape).transpose(1, 2) for name in "qkv")
        cache = others.get(CACHE_NAME)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        k, v = self.change(self, k, v)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, plain)
        out, _ = attend(self, q, k, v, attention_mask, scaling=1 / math.sqrt(8))
        out = out.reshape(*hidden_states.shape[:-1], -1)
        return (self.wide if out.shape[-1] == 16 else self.original.o_proj)(out), None


def deriving(change: Change) -> nn.Module:
    model: Any = tiny("llama", SIZES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        for layer in model.model.layers:
            layer.self_attn = Deriving(layer.self_attn, change)
    return model.eval().requires_grad_(False)


def filled(module: Deriving, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    made = k.new_empty(k.shape)
    made[..., :3].copy_(k[..., :3] * 2.0)
    made[..., 3:].copy_(v[..., 3:])
    return made, v


DERIVED: dict[str, Change] = {
    "expanded": lambda m, k, v: (m.up(k), m.up(v) + k),
    "narrower": lambda m, k, v: (m.up(k), m.narrow(v)),
    "repeated": lambda m, k, v: (k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)),
    "crossed": lambda m, k, v: (k, v.flip(1)),
    "filled": filled,
    "normed": lambda m, k, v: (k * torch.rsqrt(k.square().mean(-1, keepdim=True) + 1e-6), v.tanh()),
}
MIXED: dict[str, Change] = {
    "summed": lambda m, k, v: (k.cumsum(2), v),
    "shifted": lambda m, k, v: (torch.cat((k[:, :, :1], k[:, :, :-1]), 2), v),
    "centred": lambda m, k, v: (k, v - v.mean(2, keepdim=True)),
    "turned": lambda m, k, v: (k.flip(2), v),
    "counted": lambda m, k, v: (k * (1.0 + torch.arange(k.shape[2])[:, None]), v),
    "constant": lambda m, k, v: (k, torch.ones_like(v) * m.up.weight[0]),
}


@pytest.mark.parametrize("name", DERIVED)
def test_what_is_read_is_cached(name: str) -> None:
    model = deriving(DERIVED[name])
    graphs = capture_language_model(model, name, WORKLOAD).verify()
    assert graphs.eager_reason == ""
    want, logits = greedy(model, PROMPT, 8)
    found, seen, _ = generate(model, graphs, PROMPT, 8)
    assert found == want
    torch.testing.assert_close(seen, logits, rtol=1e-4, atol=1e-4 * float(logits.std()))
    assert graphs.kv is not None and graphs.kv.value_dim == (4 if name == "narrower" else 8)
    assert graphs.kv.kv_heads == (4 if name == "repeated" else 2)


@pytest.mark.parametrize("name", MIXED)
def test_positions_that_are_mixed_or_told_apart_refuse(name: str) -> None:
    graphs = capture_language_model(deriving(MIXED[name]), name, WORKLOAD)
    assert graphs.graphs == () and "other K and V than it caches" in graphs.eager_reason
