"""Data of a model's buffers: what they hold, or, of a model without weights, what its own initialization puts there."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def buffers_of(model: nn.Module) -> Callable[[str], Tensor | None]:
    """What gives a buffer of ``model`` by its name, on the CPU; None where there is no such data."""
    named = dict(model.named_buffers())

    def data(name: str) -> Tensor | None:
        buffer = named.get(name)
        if buffer is None:
            return None
        return _initialized(model, name, buffer) if buffer.is_meta else buffer.cpu()

    return data


def _initialized(model: Any, name: str, buffer: Tensor) -> Tensor | None:
    """As transformers fills buffers that no checkpoint holds; tried on two different contents, so that what it leaves alone shows."""
    owner, _, leaf = name.rpartition(".")
    made = []
    for content in (0, 1):
        twin: Any = copy.copy(model.get_submodule(owner))
        twin._buffers = {**twin._buffers, leaf: torch.full(buffer.shape, content, dtype=buffer.dtype)}
        try:
            model._init_weights(twin)
        except Exception:  # a model that cannot do it has no data
            return None
        made.append(twin._buffers[leaf])
    return made[0] if not made[0].is_meta and torch.equal(*made) else None
