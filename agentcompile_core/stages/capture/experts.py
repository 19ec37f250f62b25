"""Mixtures of experts, seen during capture: two ``agentcompile.expert_linear`` calls per layer, with everything between them as it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ...ops import operators as operators
from .attention import Unsupported

IMPLEMENTATION = "agentcompile"
_SWITCH = "_experts_implementation"


def experts_function(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' forward called ``agentcompile``: what transformers' own do, without a copy of a matrix or an order of rows.

    ``hidden_states`` [T, h], ``top_k_index`` i64 and ``top_k_weights`` [T, S]; the result [T, h].

    Raises:
        Unsupported: the experts are spread over several processes.
    """
    if getattr(self, "_is_expert_parallel", False):
        raise Unsupported("its experts are spread over several processes")
    gated = getattr(self, "has_gate", True)
    rows = _linear(self, "gate_up_proj" if gated else "up_proj", hidden_states.unsqueeze(1), top_k_index)
    flat = rows.flatten(0, 1)
    activated: Tensor = self._apply_gate(flat) if gated else self.act_fn(flat)  # type: ignore[operator]
    out = _linear(self, "down_proj", activated.unflatten(0, top_k_index.shape), top_k_index)
    if getattr(self, "has_post_expert_norm", False):
        out = self.post_expert_norm(out)  # type: ignore[operator]
    return (out * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


def _linear(module: nn.Module, name: str, rows: Tensor, experts: Tensor) -> Tensor:
    bias = getattr(module, f"{name}_bias") if getattr(module, "has_bias", False) else None
    transposed = bool(getattr(module, "is_transposed", False))
    return torch.ops.agentcompile.expert_linear.default(rows, getattr(module, name), experts, bias, transposed)


@contextmanager
def semantic_experts(model: nn.Module) -> Iterator[None]:
    """During the block, experts of ``model`` that ask transformers' interface for their forward get ours."""
    found: list[Any] = [getattr(part, "config", None) for part in model.modules()]
    configs = {id(config): config for config in found if hasattr(config, _SWITCH)}
    before = {key: getattr(config, _SWITCH) for key, config in configs.items()}
    try:
        for config in configs.values():
            setattr(config, _SWITCH, IMPLEMENTATION)
        yield
    finally:
        for key, config in configs.items():
            setattr(config, _SWITCH, before[key])


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_function)
