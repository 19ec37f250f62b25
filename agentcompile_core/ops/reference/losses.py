"""Error rules of losses element by element: the operations that they are, each with its own rule.

What an operator is stands in ``losses``, for kernels and for this rule alike; whether it says the same as the framework is what the
second opinion is asked.
"""

from collections.abc import Callable

from attrs import define, field

from ...errors import AgentCompileError
from ...ir.expression import PointwiseKind
from ...ir.graph import Argument, DType, Ref
from ..losses import LOSSES, write_loss
from ..schema import argument
from . import pointwise
from .bounded import STORED, TINY, UNIT_ROUNDOFF, Bounded, consumed
from .calls import Call

K = PointwiseKind
NARROW = (DType.F16, DType.BF16)


def _minus(a: Bounded, b: Bounded) -> Bounded:
    return pointwise.add(a, b, -1.0)


def _greater(a: Bounded, b: Bounded) -> Bounded:
    return pointwise.compared(a.value > b.value, a, b)


def _equal(a: Bounded, b: Bounded) -> Bounded:
    return pointwise.compared(a.value == b.value, a, b)


_RULES: dict[PointwiseKind, Callable[..., Bounded]] = {
    K.ADD: pointwise.add, K.SUB: _minus, K.MUL: pointwise.mul, K.DIV: pointwise.div, K.MAX: pointwise.larger, K.MIN: pointwise.smaller,
    K.GREATER: _greater, K.EQUAL: _equal, K.WHERE: pointwise.where,
    **{kind: lambda x, name=kind.value: pointwise.unary(name, x) for kind in (K.NEG, K.ABS, K.EXP, K.LOG, K.LOG1P)},
}


@define
class _Bounds:
    """Operations as they are carried out on bounds; in half precision the framework may round each result."""

    call: Call
    given: dict[str, Bounded]
    made: list[Bounded] = field(factory=list)

    def add(self, kind: PointwiseKind, *operands: Argument) -> Ref:
        found = _RULES[kind](*map(self._operand, operands))
        dtype = self.call.dtype
        if dtype in NARROW and found.value.is_floating_point():
            found = Bounded(found.value, found.error + STORED * UNIT_ROUNDOFF[dtype] * found.value.abs() + TINY[dtype])
        self.made.append(found)
        return Ref(f"#{len(self.made) - 1}")

    def _operand(self, given: Argument) -> Bounded:
        if isinstance(given, Ref):
            if not given.value.startswith("#"):
                return self.given[given.value]
            made = self.made[int(given.value[1:])]
            return consumed(made, self.call.dtype) if made.value.is_floating_point() else made
        return pointwise.bounded(given, next(iter(self.given.values())).value, self.call.dtype)


def _loss(call: Call) -> tuple[Bounded, ...]:
    names = [given.value for name in ("self", "target") if isinstance(given := argument(call.node, name), Ref)]
    read = [call.bounded(name) for name in ("self", "target")]
    if not call.dtype.is_float or not all(x.value.is_floating_point() for x in read):
        raise AgentCompileError(f"the reference has no error rule for {call.node.op} of other than floats; it stays on the framework")
    bounds = _Bounds(call, dict(zip(names, read, strict=True)))
    if not write_loss(bounds, call.node):
        raise AgentCompileError(f"the reference has no error rule for {call.node.op} with these arguments; it stays on the framework")
    return (bounds.made[-1],)


RULES = dict.fromkeys(LOSSES, _loss)
