"""``linear``: one row times one weight matrix by the BLAS behind torch, with an addition where the match has one."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from agentcompile_core.plugin_api import (
    LINEAR,
    Expression,
    Implementation,
    Match,
    Origin,
    Parameter,
    PointwiseKind,
    Reject,
    Schedule,
    ScheduleSpace,
    Target,
)

from .types import mixed

if TYPE_CHECKING:
    from torch import Tensor

CALLS = ("matrix", "vector")


class VendorLinear(Implementation):
    """``out = weight @ x`` or ``out = weight @ x + aux0``, one rounding at the end."""

    name = "linear"
    version = 2
    origin = Origin.THIRD_PARTY
    capturable = True

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """Plain products of one matrix, and those with one vector added, all of one type."""
        if match.kind != LINEAR:
            return Reject("serves linear matches only")
        if match.integer("pair") != 1 or match.text("norm") != "none":
            return Reject("a BLAS call holds no norm before it and no second matrix")
        if match.epilogue is not None and not is_addition(match.epilogue):
            return Reject("a BLAS call adds one vector at the most")
        if match.operand("aux0") is not None and match.need("aux0").spec.numel != match.integer("n"):
            return Reject("the vector that is added must be as long as the result")
        why_not = mixed(match)
        return Reject(why_not) if why_not else True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """As a product of matrices, or of a matrix and a vector: libraries choose other kernels for the two."""
        return ScheduleSpace(parameters=(Parameter(name="call", values=CALLS),), points=tuple(Schedule({"call": call}) for call in CALLS))

    def bind(self, match: Match, schedule: Schedule, target: Target) -> "Callable[..., None]":
        """``run(x, weight, out[, aux0])``."""
        return _as_matrix if schedule["call"] == "matrix" else _as_vector


def is_addition(epilogue: Expression) -> bool:
    """Whether an epilogue is ``acc0 + aux0``, with or without a rounding of the sum before it (its error budget covers both)."""
    rounded = [i for i, op in enumerate(epilogue.operations) if op.kind is PointwiseKind.ROUND and op.operands == ("acc0",)]
    rest = [op for i, op in enumerate(epilogue.operations) if i not in rounded]
    if tuple(epilogue.arguments) == ("acc0",):
        return not rest
    if tuple(epilogue.arguments) != ("acc0", "aux0") or len(rest) != 1 or rest[0].kind is not PointwiseKind.ADD:
        return False
    return {"acc0" if given in rounded else given for given in rest[0].operands} == {"acc0", "aux0"}


def _as_matrix(x: "Tensor", weight: "Tensor", out: "Tensor", aux0: "Tensor | None" = None) -> None:
    import torch

    n, k = weight.shape
    if aux0 is None:
        torch.mm(x.view(1, k), weight.t(), out=out.view(1, n))
    else:
        torch.addmm(aux0.view(1, n), x.view(1, k), weight.t(), out=out.view(1, n))


def _as_vector(x: "Tensor", weight: "Tensor", out: "Tensor", aux0: "Tensor | None" = None) -> None:
    import torch

    n, k = weight.shape
    if aux0 is None:
        torch.mv(weight, x.view(k), out=out.view(n))
    else:
        torch.addmv(aux0.view(n), weight, x.view(k), out=out.view(n))
