"""When two results count as the same: the bounds of comparisons between a graph or program and its module."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ir.graph import DType, Graph
from .dtypes import torch_dtype

FLOAT32_SHARE = 1e-4  # of the output's rms, and of the element itself
FLOAT32_BOUND = 1e-3  # relative rms error of a step in float32
BY_ROUNDING = "is off by"  # how a difference is called that roundings might have made
HALF_ROUNDINGS = 24  # relative rms error in units of the type's epsilon: what honest roundings of many layers add up to


def disagreement(found: Sequence[Tensor], wanted: Sequence[Tensor], computed_in: torch.dtype | None = None,
                 share: float = FLOAT32_SHARE) -> str:
    """One clause on how ``found`` differs from ``wanted`` beyond rounding; empty where they agree. What no rounding makes comes first.

    float32 and wider agree element by element within ``share`` of the rms and of the element; narrower floats in relative rms
    within 24 of their epsilon; integers exactly. NaN and infinities are where they were. ``computed_in``: the narrow type that wider
    results were computed in before they were cast, which they err as.
    """
    if len(found) != len(wanted):
        return f"it gives {len(found)} results instead of {len(wanted)}"
    seen = ""
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        why = _difference(one, other, computed_in, share)
        if why and (not seen or (is_by_rounding(seen) and not is_by_rounding(why))):
            seen = f"result {index} {why}" if len(found) > 1 else f"its result {why}"
    return seen


def is_by_rounding(why: str) -> bool:
    """Whether roundings might have made the difference that ``disagreement`` says."""
    return BY_ROUNDING in why


def _difference(found: Tensor, wanted: Tensor, computed_in: torch.dtype | None, share: float) -> str:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"is {tuple(found.shape)} {found.dtype} instead of {tuple(wanted.shape)} {wanted.dtype}"
    if torch.equal(found, wanted):
        return ""
    if not wanted.is_floating_point():
        return f"differs in {int((found != wanted).sum())} of {wanted.numel()} elements"
    finite = torch.isfinite(wanted)
    if not torch.equal(found[~finite].nan_to_num(7.0), wanted[~finite].nan_to_num(7.0)) or not bool(torch.isfinite(found[finite]).all()):
        return "has NaN or infinities elsewhere"
    one, other = found[finite].double(), wanted[finite].double()
    rms = float(other.square().mean().sqrt()) if other.numel() else 0.0
    error = (one - other).abs()
    dtype = max(filter(None, (wanted.dtype, computed_in)), key=lambda one: torch.finfo(one).eps)
    if torch.finfo(dtype).eps <= torch.finfo(torch.float32).eps:
        wrong = bool((error > share * (rms + other.abs())).any())
    else:
        wrong = float(error.square().mean().sqrt()) > half_bound(dtype) * rms
    return f"{BY_ROUNDING} {float(error.max()):.3g} where its rms is {rms:.3g}" if wrong else ""


def half_bound(dtype: torch.dtype) -> float:
    """The relative rms error that honest roundings to ``dtype`` may add up to over the layers of a model."""
    return HALF_ROUNDINGS * torch.finfo(dtype).eps


def program_bound(graph: Graph) -> float:
    """The relative rms error that programs of one graph may have: a state or result in float32 errs as what it was computed from."""
    narrow = {v.spec.dtype for v in graph.values} & {DType.F16, DType.BF16}
    return max((half_bound(torch_dtype(dtype)) for dtype in narrow), default=FLOAT32_BOUND)


def beyond(found: Tensor, wanted: Tensor, bound: float, named: str = "the single step") -> str:
    """One clause on how the rms error of ``found`` is more than ``bound`` of the rms of ``wanted``, that of ``named``; empty: it is not."""
    one, other = found.double(), wanted.double()
    if not bool(torch.isfinite(one).all()) or not bool(torch.isfinite(other).all()):
        return "it makes numbers that are NaN or infinite"
    error, rms = float((one - other).square().mean().sqrt()), float(other.square().mean().sqrt())
    return "" if error <= bound * rms else f"its rms error is {error:.3g} where {named}'s rms is {rms:.3g}"
