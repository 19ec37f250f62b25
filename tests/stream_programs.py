"""Programs of tensors that hypothesis draws: views of views, writes through them, parts that are joined, mixed and repeated."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from hypothesis import strategies as st
from torch import Tensor, nn

_WRITES: dict[str, Callable[..., Tensor]] = {"add": Tensor.add_, "sub": Tensor.sub_, "mul": Tensor.mul_, "copy": Tensor.copy_}
_PURE: dict[str, Callable[..., Tensor]] = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}
_KINDS = (*("assign", "cut", "mix") * 3, *("write", "join", "repeat", "again") * 2, "pure", "select", "turn", "flat", "expand")
MOST, LARGEST = 600, 1000  # elements, and what they are: sums and products of whole numbers stay exact in float32


class Of(nn.Module):
    """A module of one call, for what takes modules."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *given: Tensor) -> Any:
        """What the call makes of tensors."""
        return self.call(*given)


@frozen
class Program:
    """Steps over a pool of tensors, each of which appends what it makes; ``given``: those it begins with, ``kept``: those it returns."""

    given: tuple[Tensor, ...]
    steps: tuple[tuple[Any, ...], ...]
    kept: tuple[int, ...]

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Run the steps; the first result is what it is, the others are read once more."""
        pool = list(given)
        for step in self.steps:
            pool.append(performed(pool, step))
        return tuple(torch.neg(pool[at]) if place else pool[at] for place, at in enumerate(self.kept))

    @property
    def mixes(self) -> bool:
        """Whether it multiplies matrices, whose sums may be added in another order."""
        return any(step[0] == "mix" for step in self.steps)


def performed(pool: Sequence[Tensor], step: tuple[Any, ...]) -> Tensor:
    """What one step makes of the pool."""
    kind, at, *rest = step
    x = pool[at]
    if kind in ("pure", "write", "assign", "join"):
        name, other, where = rest[0], pool[rest[1]] if type(rest[1]) is int else rest[1], _where(*rest[2:])
        if kind in ("pure", "write"):
            return (_PURE if kind == "pure" else _WRITES)[name](x, other)
        if kind == "assign" and name == "sub":
            x[where] = _PURE[name](x[where], other)
        elif kind == "assign":
            x[where] = _WRITES[name](x[where], other)
        else:
            axis, first, end, _ = rest[2:]
            made = _PURE[name](x[where], other)
            return torch.cat([x.narrow(axis, 0, first), made, x.narrow(axis, end, x.shape[axis] - end)], axis)
        return x
    if kind == "again":  # written to a part, and that once more to where it is
        made = x[_where(*rest)].add_(1)
        return x[_where(*rest)].copy_(made)
    if kind == "mix":
        rank, streams = x.dim(), x.shape[0]
        flat = pool[rest[0]].reshape(-1)[: streams * rest[1]].reshape(*(1,) * (rank - 2), rest[1], streams)
        factors = flat.permute(*range(rank - 2), rank - 1, rank - 2)
        return torch.matmul(x.permute(*range(1, rank), 0), factors).permute(rank - 1, *range(rank - 1))
    calls: dict[str, Callable[..., Tensor]] = {
        "cut": lambda *cut: x[_where(*cut)], "select": x.select, "turn": x.transpose, "flat": lambda: x.reshape(-1), "repeat": x.repeat,
        "expand": x.expand}
    return calls[kind](*rest)


def _where(*cut: Any) -> tuple[slice, ...]:
    axis, first, end, step = cut or (0, None, None, 1)
    return (slice(None),) * axis + (slice(first, end, step),)


@st.composite
def programs(draw: Any) -> Program:
    """Up to twelve steps and repetitions; those that torch refuses (a write to what lies over itself) are left out."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64]))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    if len(shape) > 2 and draw(st.booleans()):
        shape[1:-1] = [1] * (len(shape) - 2)
    random = torch.Generator().manual_seed(draw(st.integers(0, 3)))
    shapes = [shape, *([extent if draw(st.booleans()) else 1 for extent in shape] for _ in range(2))]
    given = tuple(torch.randint(-3, 4, one, generator=random).to(dtype) for one in shapes)
    pool, steps = [one.clone() for one in given], list[tuple[Any, ...]]()
    wanted = [("pure", at, "mul", 2.0 if dtype.is_floating_point else one) for at, one in enumerate((0, 1, 2)) if draw(st.integers(0, 4))]
    count = draw(st.integers(1, 12))
    while wanted or count:
        if not wanted:
            wanted, count = [draw(_steps(pool))], count - 1
            if wanted[0][0] in ("assign", "join") and draw(st.booleans()):  # as every layer has them
                wanted += [(wanted[0][0], len(pool) + again, *wanted[0][2:]) for again in range(3)]
        step = wanted.pop(0)
        try:
            made = performed(pool, step)
        except (RuntimeError, IndexError):
            wanted = []
            continue
        if made.numel() > MOST or not bool((made.abs() < LARGEST).all()):
            break  # what it wrote is not in the steps, and nothing comes behind it
        steps.append(step)
        pool.append(made)
    later = range(len(given), len(pool))
    kept = draw(st.lists(st.sampled_from(later), min_size=1, max_size=4, unique=True)) if later else []
    return Program(given=given, steps=tuple(steps), kept=tuple(kept))


@st.composite
def _steps(draw: Any, pool: Sequence[Tensor]) -> tuple[Any, ...]:
    kind = draw(st.sampled_from(_KINDS))
    at = draw(st.one_of(st.integers(max(len(pool) - 4, 0), len(pool) - 1), st.integers(0, len(pool) - 1)))
    x = pool[at]
    axis = draw(st.integers(0, max(x.dim() - 1, 0)))
    extent = x.shape[axis] if x.dim() else 1
    first = draw(st.integers(0, max(extent - 1, 0)))
    cut = (axis, first, draw(st.integers(first, extent)), 1)
    if kind in ("pure", "write", "assign", "join"):
        numbers = st.sampled_from([2.0, -1.0, 0.5] if x.is_floating_point() else [True])
        other = draw(st.one_of(numbers, st.integers(0, len(pool) - 1)))
        name = draw(st.sampled_from(list(_WRITES if kind == "write" else _PURE)))
        return (kind, at, name, other, *(cut if kind in ("assign", "join") else ()))
    if kind == "again":
        return kind, at, *cut
    if kind == "cut":
        begin, end = draw(st.sampled_from([first, first - extent])), draw(st.sampled_from([cut[2], None, extent + 3]))
        return kind, at, axis, begin, end, draw(st.sampled_from([1, 1, 1, 2]))
    if kind in ("select", "turn"):
        return kind, at, axis - draw(st.sampled_from([0, x.dim()])), draw(st.integers(0, max(x.dim() - 1, 0))) if kind == "turn" else 0
    if kind in ("repeat", "expand"):
        times = [draw(st.integers(1, 3)) if one == 1 or (kind == "repeat" and draw(st.booleans())) else 1 for one in x.shape]
        counts = times if kind == "repeat" else [many if one == 1 else one for many, one in zip(times, x.shape, strict=True)]
        return kind, at, (*draw(st.sampled_from([(), (2,), (1,)])), *counts)
    return (kind, at, draw(st.integers(0, len(pool) - 1)), draw(st.integers(1, 4))) if kind == "mix" else (kind, at)
