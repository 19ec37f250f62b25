"""``activation``: an activation function, alone or times a second input."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from agentcompile_core.plugin_api import (
    ELEMENTWISE,
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

from .package import absent, unserved, warps_for

if TYPE_CHECKING:
    from torch import Tensor

KINDS = (PointwiseKind.SILU, PointwiseKind.GELU, PointwiseKind.GELU_TANH, PointwiseKind.RELU, PointwiseKind.SIGMOID)
BLOCKS = (512, 1024, 256)  # elements of a program, the best guess first
EACH = 4  # of a thread


@frozen(kw_only=True)
class Activation:
    """``kind`` of ``x``, rounded where ``is_rounded``, times ``other`` (empty: alone)."""

    kind: PointwiseKind
    x: str
    other: str = ""
    is_rounded: bool = False


class TritonActivation(Implementation):
    """``out = act(x)`` or ``out = act(x) * other``, of operands alike."""

    name = "activation"
    version = 1
    origin = Origin.HANDWRITTEN
    capturable = True

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """One activation of one input, at most one product with another one of the same size and type."""
        if match.kind != ELEMENTWISE:
            return Reject("serves elementwise matches only")
        inputs = tuple(operand for operand in match.operands if operand.name != "out")
        found = activation_of(match.epilogue)
        if found is None or {operand.name for operand in inputs} != {found.x, found.other} - {""}:
            return Reject(f"the kernel computes one of {', '.join(kind.value for kind in KINDS)}, alone or times another input")
        if any(match.text(f"broadcast{i}", "full") != "full" for i in range(len(inputs))) \
                or {operand.spec.numel for operand in match.operands} != {match.integer("count")}:
            return Reject("the kernel reads inputs as large as its result")
        why_not = unserved(*match.operands) or absent()
        return Reject(why_not) if why_not else True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """Three block sizes."""
        return ScheduleSpace(parameters=(Parameter(name="block", values=BLOCKS),), points=tuple(Schedule({"block": b}) for b in BLOCKS))

    def bind(self, match: Match, schedule: Schedule, target: Target) -> "Callable[..., None]":
        """``run(in0, out[, in1])``."""
        from .kernels import activate

        found, count, block = activation_of(match.epilogue), match.integer("count"), schedule.integer("block")
        assert found is not None
        launch, warps = activate[(-(-count // block),)], warps_for(block, EACH)
        kind, is_first, is_rounded = found.kind.value, found.x == "in0", found.is_rounded

        def run(in0: "Tensor", out: "Tensor", in1: "Tensor | None" = None) -> None:
            x, other = (in0, in1) if is_first else (in1, in0)
            launch(x, other, out, count, KIND=kind, ROUNDED=is_rounded, BLOCK=block, num_warps=warps)

        return run


def activation_of(expression: Expression | None) -> Activation | None:
    """What an expression is if it is an activation, rounded or not, and at most one product behind it; else None."""
    operations = list(expression.operations) if expression is not None else []
    if expression is None or not operations or operations[0].kind not in KINDS:
        return None
    (x,) = operations[0].operands
    if not isinstance(x, str):
        return None
    made, is_rounded = 0, False
    if len(operations) > 1 and operations[1].kind is PointwiseKind.ROUND and operations[1].operands == (0,):
        made, is_rounded = 1, True
    behind = operations[made + 1:]
    if not behind:
        return Activation(kind=operations[0].kind, x=x)  # a rounding of what is written rounds nothing more
    factors = [given for given in behind[0].operands if not (type(given) is int and given == made)]
    if len(behind) > 1 or behind[0].kind is not PointwiseKind.MUL or len(factors) != 1:
        return None
    (other,) = factors
    if not isinstance(other, str) or other == x or set(expression.arguments) != {x, other}:
        return None
    return Activation(kind=operations[0].kind, x=x, other=other, is_rounded=is_rounded)
