"""Rotary embedding modules become one ``agentcompile.rotary_embedding`` call each, where that is the same function."""

import copy
import enum
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from ...ir.frequencies import Frequencies
from ...ir.graph import Graph
from ...ops import operators as ops  # noqa: F401  # registers them
from .unsupported import Unsupported

_PREFIX = "inv_freq"
_LONG, _GROWING = "longrope", "dynamic"  # two sets of frequencies; one that changes with every position beyond the model's own limit
_PREPARE = "prepare_inputs_for_generation"
_NEAR_LIMIT = "original_max_position_embeddings"  # of a configuration, and of what it says of rotations
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


def frequencies_of(model: nn.Module, graphs: Iterable[Graph]) -> tuple[Frequencies, ...]:
    """What those buffers hold that ``graphs`` read and that modules have whose frequencies depend on how long a sequence is.

    A buffer is one under all of its names.

    Raises:
        Unsupported: they are chosen otherwise than by one limit for all.
    """
    turning = [(path, module) for path, module in model.named_modules() if _kinds(module) & {_LONG, _GROWING}]
    if not turning:  # nearly all models: what their graphs read is not gone through
        return ()
    found, rereads, sources = [], _drops_its_cache(model), {value.source for graph in graphs for value in graph.values}
    names = [(name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name in sources]
    for path, module in turning:
        for layer_type in _layer_types(module):
            mine = [name for name, buffer in names if buffer is getattr(module, _names(layer_type)[0])]
            if mine and _kind_of(module, layer_type) in (_LONG, _GROWING):
                pair = _near_and_far(module, layer_type)
                if pair is None:
                    raise Unsupported(f"the frequencies of {path} depend on the length of a sequence otherwise than by one limit")
                limit, near, far = pair
                found += [Frequencies(source=name, limit=limit, near=tuple(near.tolist()), far=tuple(far.tolist()), rereads=rereads)
                          for name in mine]
    if len({one.limit for one in found if one.changes}) > 1:
        raise Unsupported("the frequencies of its layers depend on the length of a sequence by several limits")
    return tuple(found)


def _kinds(module: nn.Module) -> set[str]:
    """What the configuration calls the module's frequencies, of all types of layers."""
    kinds = getattr(module, "rope_type", "")
    return {str(kind) for kind in (kinds.values() if isinstance(kinds, dict) else (kinds,))} - {""}


def _kind_of(module: nn.Module, layer_type: str | None) -> str:
    kinds: Any = module.rope_type
    return str(kinds if layer_type is None else kinds[layer_type])


def _drops_its_cache(model: nn.Module) -> bool:
    """Whether generation reads a sequence again that grows beyond the limit: Phi's models ask for the limit where they prepare a step."""
    own = [vars(kind)[_PREPARE] for kind in type(model).__mro__ if _PREPARE in vars(kind) and kind is not GenerationMixin]
    return any(_NEAR_LIMIT in inspect.unwrap(one).__code__.co_names for one in own)


def _near_and_far(module: nn.Module, layer_type: str | None) -> tuple[int, Tensor, Tensor] | None:
    """Up to which length a sequence has which frequencies, and those beyond; None where the module turns otherwise.

    It is asked: for sequences as long as the limit, and one longer, back and forth, it returns what the operator does. Nothing is compiled
    beyond the limit of those that grow: it is the model's.
    """
    config: Any = module.config
    is_long, twin, found, (name, scaling) = _kind_of(module, layer_type) == _LONG, _apart(module), list[Tensor](), _names(layer_type)
    said = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    limit = int(said[_NEAR_LIMIT] if is_long else config.max_position_embeddings)
    for length in (limit, limit + 1, limit, limit + 7, 1) if is_long else (limit, limit // 2, 1):
        had: Any = getattr(twin, name)
        positions, x = torch.tensor([[0, length // 3, length - 1]], device=had.device), torch.zeros(1, 3, 2 * len(had), device=had.device)
        try:
            got = type(module).forward(twin, *((x, positions) if layer_type is None else (x, positions, layer_type)))
        except Exception:  # transformers 5.17 fails for layers of several types that turn a second long sequence
            return None
        used = getattr(twin, name).detach().clone()
        found.append(used)
        wanted = [_table(positions, used, float(getattr(twin, scaling)), x.dtype, style) for style in (_Style.HALF, _Style.INTERLEAVED)]
        if not any(all(torch.equal(g, w) for g, w in zip(got, want, strict=True)) for want in wanted):
            return None
    near, far = found[:2]
    same = all(torch.equal(one, near if index % 2 == 0 else far) for index, one in enumerate(found)) and (is_long or torch.equal(near, far))
    same = same and torch.equal(far.to(near.dtype).float(), far.float())  # a buffer in half precision may get far ones that it cannot hold
    return (limit, near.float().cpu(), far.float().cpu()) if same else None


def _apart(module: nn.Module) -> nn.Module:
    """A copy whose buffers and attributes share no memory with the module's; one made anew where it has none."""
    if any(buffer.is_meta for buffer in module.buffers()):
        made: nn.Module = type(module)(config=module.config)
        return made
    twin = copy.copy(module)
    twin._buffers = {name: None if buffer is None else buffer.detach().clone() for name, buffer in module._buffers.items()}
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            vars(twin)[name] = value.detach().clone()
    return twin


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
    layer_types = _layer_types(module)
    if not layer_types:
        return False
    return all(_agrees(module, layer_type, style) for layer_type in layer_types)


def _agrees(module: nn.Module, layer_type: str | None, style: _Style, grids: bool = False) -> bool:
    """Whether the module returns what the operator does; with ``grids`` for three times the same positions."""
    twin = copy.copy(module)
    if _kinds(module) & {_LONG, _GROWING}:  # which frequencies it takes is another question, see ``frequencies_of``
        twin.rope_type = "default" if layer_type is None else {layer_type: "default"}  # type: ignore[assignment]
    frequencies, scaling = _names(layer_type)
    half = getattr(module, frequencies).shape[0]
    made_up = torch.linspace(1.0, 0.01, half)
    # A plain dict entry instead of a registered buffer: the twin shares nothing that a write could reach.
    twin._buffers = {**module._buffers, frequencies: made_up.clone()}
    x, positions = torch.zeros(1, 5, 2 * half), torch.tensor([[0, 1, 7, 100, 5000]])
    given = positions.expand(_GRIDS, *positions.shape) if grids else positions
    arguments: tuple[Any, ...] = (x, given) if layer_type is None else (x, given, layer_type)
    try:
        got = type(module).forward(twin, *arguments)
        want = _table(positions, made_up, float(getattr(twin, scaling)), x.dtype, style)  # whatever it wrote to its own
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
