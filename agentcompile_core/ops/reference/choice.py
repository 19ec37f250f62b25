"""The error rules of the largest elements of one row and where they are, and of what is picked by that."""

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
