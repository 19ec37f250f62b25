"""Rotary embedding modules become one ``agentcompile.rotary_embedding`` call each, where that is the same function."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...ops import operators as ops

_PREFIX = "inv_freq"
_DYNAMIC = ("dynamic", "longrope")


@contextmanager
def semantic_rotary(model: nn.Module) -> Iterator[None]:
    """During the block, rotary modules of ``model`` that compute what the operator computes call the operator.

    A module qualifies by behaviour: its own forward and the operator agree bitwise on a copy with made-up frequencies, in one of
    the operator's two layouts.
    Others are captured as they are.
    """
    patched = []
    try:
        for module in model.modules():
            if not type(module).__name__.endswith("RotaryEmbedding"):
                continue
            interleaved = next((style for style in (False, True) if _qualifies(module, style)), None)
            if interleaved is not None:
                module.forward = _replacement(module, interleaved)  # type: ignore[method-assign]
                patched.append(module)
        yield
    finally:
        for module in patched:
            del module.forward


def _layer_types(module: nn.Module) -> list[str | None]:
    """The prefixes of the module's frequency buffers; ``None`` for the one without a prefix."""
    names = [name for name, _ in module.named_buffers(recurse=False)]
    if _PREFIX in names:
        return [None]
    suffix = f"_{_PREFIX}"
    return [n.removesuffix(suffix) for n in names if n.endswith(suffix) and not n.endswith(f"original{suffix}")]


def _names(layer_type: str | None) -> tuple[str, str]:
    prefix = "" if layer_type is None else f"{layer_type}_"
    return f"{prefix}{_PREFIX}", f"{prefix}attention_scaling"


def _qualifies(module: nn.Module, interleaved: bool) -> bool:
    kinds = getattr(module, "rope_type", "default")
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    layer_types = _layer_types(module)
    if any(kind in _DYNAMIC for kind in kinds) or not layer_types:
        return False
    return all(_agrees(module, layer_type, interleaved) for layer_type in layer_types)


def _agrees(module: nn.Module, layer_type: str | None, interleaved: bool) -> bool:
    twin = copy.copy(module)
    frequencies, scaling = _names(layer_type)
    half = getattr(module, frequencies).shape[0]
    # A plain dict entry instead of a registered buffer: the twin shares nothing that a write could reach.
    twin._buffers = {**module._buffers, frequencies: torch.linspace(1.0, 0.01, half)}
    x, positions = torch.zeros(1, 5, 2 * half), torch.tensor([[0, 1, 7, 100, 5000]])
    arguments: tuple[Any, ...] = (x, positions) if layer_type is None else (x, positions, layer_type)
    try:
        got = type(module).forward(twin, *arguments)
        want = ops.rotary_embedding(positions, getattr(twin, frequencies), float(getattr(twin, scaling)), x.dtype, interleaved)
    except Exception:  # any surprise means: capture the module as it is
        return False
    return isinstance(got, tuple) and len(got) == 2 and all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def _replacement(module: nn.Module, interleaved: bool) -> Any:
    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        frequencies, scaling = _names(layer_type)
        return torch.ops.agentcompile.rotary_embedding.default(
            position_ids, getattr(module, frequencies), float(getattr(module, scaling)), x.dtype, interleaved
        )

    return forward
