"""Rotary embedding modules become one ``agentcompile.rotary_embedding`` call each, where that is the same function."""

import copy
import enum
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...ops import operators as ops  # noqa: F401  # registers them

_PREFIX = "inv_freq"
_DYNAMIC = ("dynamic", "longrope")
_GRIDS = 3
_CLOSE = 2.0**-22  # of cos and sin, computed by two functions


class _Style(enum.Enum):
    """What a rotary module returns."""

    HALF = "half"  # cos and sin, each frequency once in either half
    INTERLEAVED = "interleaved"  # cos and sin, each frequency two times behind each other
    COMPLEX = "complex"  # cos + i sin of each frequency


@contextmanager
def semantic_rotary(model: nn.Module) -> Iterator[None]:
    """During the block, rotary modules of ``model`` that compute what the operator computes call the operator.

    A module qualifies by behaviour: its own forward and the operator agree bitwise on a copy with made-up frequencies, in one of
    the operator's two layouts, or, where it returns complex numbers, to the last bit but one (``polar`` rounds for itself).
    Others are captured as they are, and so are calls with positions of several grids [3, B, T] (time, height, width), unless
    all grids are one by their memory, as those of text are, and the module then returns what it returns for that one.
    """
    patched = []
    try:
        for module in model.modules():
            if not type(module).__name__.endswith("RotaryEmbedding"):
                continue
            style = next((style for style in _Style if _qualifies(module, style)), None)
            if style is not None:
                module.forward = _replacement(module, style)  # type: ignore[method-assign]
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


def _qualifies(module: nn.Module, style: _Style) -> bool:
    kinds = getattr(module, "rope_type", "default")
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    layer_types = _layer_types(module)
    if any(kind in _DYNAMIC for kind in kinds) or not layer_types:
        return False
    return all(_agrees(module, layer_type, style) for layer_type in layer_types)


def _agrees(module: nn.Module, layer_type: str | None, style: _Style, grids: bool = False) -> bool:
    """Whether the module returns what the operator does; with ``grids`` for three times the same positions."""
    twin = copy.copy(module)
    frequencies, scaling = _names(layer_type)
    half = getattr(module, frequencies).shape[0]
    # A plain dict entry instead of a registered buffer: the twin shares nothing that a write could reach.
    twin._buffers = {**module._buffers, frequencies: torch.linspace(1.0, 0.01, half)}
    x, positions = torch.zeros(1, 5, 2 * half), torch.tensor([[0, 1, 7, 100, 5000]])
    given = positions.expand(_GRIDS, *positions.shape) if grids else positions
    arguments: tuple[Any, ...] = (x, given) if layer_type is None else (x, given, layer_type)
    try:
        got = type(module).forward(twin, *arguments)
        want = _table(positions, getattr(twin, frequencies), float(getattr(twin, scaling)), x.dtype, style)
    except Exception:  # any surprise means: capture the module as it is
        return False
    if isinstance(want, Tensor):
        alike = isinstance(got, Tensor) and got.dtype is want.dtype and got.shape == want.shape
        return alike and bool((torch.view_as_real(got - want).abs() <= _CLOSE * torch.view_as_real(want).abs().max()).all())
    return isinstance(got, tuple) and len(got) == 2 and all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def _table(positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype, style: _Style) -> Tensor | tuple[Tensor, Tensor]:
    """What a module of this style returns, made by the operator."""
    rounded = torch.float32 if style is _Style.COMPLEX else dtype
    interleaved = style is _Style.INTERLEAVED
    cos, sin = torch.ops.agentcompile.rotary_embedding.default(positions, inv_freq, scaling, rounded, interleaved)
    if style is not _Style.COMPLEX:
        return cos, sin
    half = inv_freq.shape[0]
    return torch.complex(cos[..., :half], sin[..., :half])


def _replacement(module: nn.Module, style: _Style) -> Any:
    grids = {kind: _agrees(module, kind, style, grids=True) for kind in _layer_types(module)}

    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if position_ids.dim() > 2:
            if not grids[layer_type] or position_ids.dim() > 3 or position_ids.stride(0) != 0:
                given = (x, position_ids) if layer_type is None else (x, position_ids, layer_type)
                made: Tensor | tuple[Tensor, Tensor] = type(module).forward(module, *given)
                return made
            position_ids = position_ids[0]
        frequencies, scaling = _names(layer_type)
        return _table(position_ids, getattr(module, frequencies), float(getattr(module, scaling)), x.dtype, style)

    return forward
