"""The error rule of the largest elements of one row and where they are."""

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
