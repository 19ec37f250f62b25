"""The error rules of the largest elements of one row and where they are, and of what is picked by that; and whether a choice is a right
one."""

import torch
from torch import Tensor

from ...errors import AgentCompileError
from .bounded import Bounded
from .calls import Call


def topk(call: Call) -> tuple[Bounded, ...]:
    """Values in falling order, and per rank every index that may have it: equal elements, and those that the errors leave in doubt.

    The s-th largest of numbers that err lies between the s-th largest of their lower and of their upper ends.
    """
    x, count, dim = call.bounded("self"), int(call["k"]), int(call["dim"])
    width = x.value.shape[-1]
    if x.value.numel() != width or dim % x.value.dim() != x.value.dim() - 1 or not (call["largest"] and call["sorted"]):
        raise AgentCompileError(f"the reference has an error rule for {call.node.op} of the largest of one row, in order; this stays on"
                                " the framework")
    value, error = x.value.double(), torch.where(x.value.isfinite(), x.error, 0.0)
    found, index = value.topk(count)
    lower, upper = ((value + sign * error).topk(count).values for sign in (-1.0, 1.0))
    spread = torch.maximum(upper - found, found - lower).nan_to_num(nan=0.0)
    exact = torch.zeros_like(index, dtype=torch.float64)
    return Bounded(found, torch.where(found.isfinite(), spread, 0.0)), Bounded(index, exact, _ranks(value, error, lower, upper))


def _ranks(value: Tensor, error: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Which elements may have each rank [ranks, elements]; of a row with NaN, which has no order, all may have any."""
    row, noise = value.reshape(1, -1), error.reshape(1, -1)
    low, high = lower.reshape(-1, 1), upper.reshape(-1, 1)
    return (((row + noise) >= low) & ((row - noise) <= high)) | value.isnan().any()


def gather(call: Call) -> tuple[Bounded, ...]:
    """Elements of one row by index; where an index is in doubt, what lies at any that it may be."""
    x, index, dim = call.bounded("self"), call.bounded("index"), int(call["dim"])
    width, rank = x.value.shape[-1], x.value.dim()
    if x.value.numel() != width or dim % rank != rank - 1:
        raise AgentCompileError(f"the reference has an error rule for {call.node.op} in one row along its last axis; this stays on the"
                                " framework")
    value, error = x.value.gather(dim, index.value), x.error.gather(dim, index.value)
    if index.choices is not None:
        row, noise = x.value.reshape(1, -1).double(), x.error.reshape(1, -1)
        away = (row - value.reshape(-1, 1).double()).abs() + noise
        error = torch.where(index.choices, away, 0.0).amax(-1).reshape(value.shape).nan_to_num(nan=0.0)
    return (Bounded(value, error),)


def may_be_chosen(scores: Bounded, chosen: Tensor, dim: int | None, *, largest: bool = True, first: bool = False) -> bool:
    """Whether there are numbers within the errors of ``scores`` of which ``chosen``, best first, are the best along ``dim`` (None: of all).

    Exact, for any number of rows: from the last one on, each is lifted to where it beats what is behind it, if its error lets it. Of
    equals any may be taken, or, where ``first``, the first one in every row. NaN counts as the largest for ``topk``, as the best for
    others, as torch takes it.
    """
    low, high = _ends(scores, dim, largest, none=torch.inf if largest or first else -torch.inf)
    chosen = chosen.reshape(*low.shape[:-1], -1) if dim is None or first else chosen.movedim(dim, -1)
    width, count = low.shape[-1], chosen.shape[-1]
    if not bool(((chosen >= 0) & (chosen < width)).all()) or not bool((chosen.sort(-1).values.diff(dim=-1) != 0).all()):
        return False
    places = chosen.long()
    others = low.scatter(-1, places, -torch.inf)
    behind = torch.cat((low.gather(-1, places)[..., 1:], others.amax(-1, keepdim=True)), -1)  # what each has to reach
    reached = high.gather(-1, places) >= behind.flip(-1).cummax(-1).values.flip(-1)
    if first and count == 1:
        earlier = torch.where(torch.arange(width, device=low.device) < places, low, -torch.inf).amax(-1, keepdim=True)
        reached &= (high.gather(-1, places) > earlier) | (places == 0)
    return bool(reached.all())


def _ends(scores: Bounded, dim: int | None, largest: bool, none: float) -> tuple[Tensor, Tensor]:
    """The least and the most that each score may be, the larger the better, along the last axis; NaN is ``none``."""
    error = torch.where(scores.value.isfinite(), scores.error, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    value, error = (one.reshape(-1) if dim is None else one.movedim(dim, -1) for one in (scores.value.double(), error))
    value = (value if largest else -value).nan_to_num(nan=none, posinf=torch.finfo(torch.float64).max, neginf=-torch.inf)
    return value - error, value + error
