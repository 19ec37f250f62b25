"""Error rules of pointwise operators that choose: comparisons, where, bounds, and activations of several pieces."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import AgentCompileError
from ..grammar import elu_parameters
from . import pointwise
from .bounded import U32, Bounded
from .calls import Call, values_in

Rule = Callable[[Call], tuple[Bounded, ...]]


def _wide(x: Bounded) -> Bounded:
    return Bounded(x.value.double() if x.value.is_floating_point() else x.value, x.error)


def _operand(call: Call, name: str) -> Bounded:
    like = call.values[0].value
    return _wide(pointwise.bounded(call[name], like, call.graph.spec(call.node.inputs[0]).dtype))


def _comparison(call: Call) -> tuple[Bounded, ...]:
    value = call.run({name: values_in(given) for name, given in call.arguments.items()})
    return (pointwise.compared(value, _operand(call, "self"), _operand(call, "other")),)


def _where(call: Call) -> tuple[Bounded, ...]:
    like = call.bounded("condition").value
    a, b = (_wide(pointwise.bounded(call[name], like, call.dtype)) for name in ("self", "other"))
    if not call.dtype.is_float:
        raise AgentCompileError(f"the reference has no error rule for {call.node.op} of {call.dtype.value}; it stays on the framework")
    return (pointwise.where(call.bounded("condition"), a, b),)


def _extreme(choose: Callable[[Bounded, Bounded], Bounded]) -> Rule:
    def rule(call: Call) -> tuple[Bounded, ...]:
        return (choose(_operand(call, "self"), _operand(call, "other")),)

    return rule


def _clamp(low: str, high: str) -> Rule:
    def rule(call: Call) -> tuple[Bounded, ...]:
        x = _wide(call.bounded("self"))
        for name, choose in ((low, pointwise.larger), (high, pointwise.smaller)):
            if name and call.arguments.get(name) is not None:
                x = choose(x, _operand(call, name))
        return (x,)

    return rule


def _relu6(call: Call) -> tuple[Bounded, ...]:
    x = _wide(call.bounded("self"))
    zero, six = (pointwise.bounded(number, x.value) for number in (0.0, 6.0))
    return (pointwise.smaller(pointwise.larger(x, zero), six),)


def _function(name: str, parameters: Callable[[Call], Callable[[Tensor], Tensor]], extra: Callable[[Call], float]) -> Rule:
    """A function with parameters; ``extra`` is what it may err absolutely, in roundings of float32."""
    def rule(call: Call) -> tuple[Bounded, ...]:
        found = pointwise.unary(name, _wide(call.bounded("self")), parameters(call))
        return (Bounded(found.value, found.error + extra(call) * U32),)

    return rule


def _leaky_relu(call: Call) -> tuple[Bounded, ...]:
    x, slope = _wide(call.bounded("self")), float(call["negative_slope"])
    below = pointwise.mul(x, pointwise.bounded(slope, x.value, call.dtype), call.dtype)
    zero = pointwise.bounded(0.0, x.value)
    return (pointwise.where(pointwise.compared(x.value > 0, x, zero), x, below),)


def _softplus(call: Call) -> Callable[[Tensor], Tensor]:
    beta, threshold = float(call["beta"]), float(call["threshold"])
    return lambda x: F.softplus(x, beta, threshold)


def _elu(call: Call) -> Callable[[Tensor], Tensor]:
    alpha, scale, inner = elu_parameters(call.node)
    return lambda x: torch.where(x > 0, x * scale, torch.expm1(torch.where(x > 0, 0.0, x) * inner) * (alpha * scale))


def _elu_size(call: Call) -> float:
    alpha, scale, _ = elu_parameters(call.node)
    return 3.0 * abs(alpha * scale)  # exp(x) - 1 may be computed as it is written


def _floor(call: Call) -> tuple[Bounded, ...]:
    return (pointwise.floor(_wide(call.bounded("self"))),)


def _threshold(call: Call) -> tuple[Bounded, ...]:
    x = _wide(call.bounded("self"))
    bound, value = (pointwise.bounded(call[name], x.value, call.dtype) for name in ("threshold", "value"))
    return (pointwise.where(pointwise.compared(x.value <= bound.value, x, bound), value, x),)


def _softshrink(call: Call) -> tuple[Bounded, ...]:
    """x less what of it lies between the bounds."""
    x, bound = _wide(call.bounded("self")), float(call["lambd"])
    low, high = (pointwise.bounded(sign * bound, x.value, call.dtype) for sign in (-1.0, 1.0))
    inside = pointwise.smaller(pointwise.larger(x, low), high)
    value = x.value - inside.value
    beyond = x.value.abs() > bound
    return (Bounded(value, torch.where(beyond | (x.error > 0), x.error + U32 * value.abs() + high.error, 0.0)),)


def _hardshrink(call: Call) -> tuple[Bounded, ...]:
    x = _wide(call.bounded("self"))
    bound, zero = (pointwise.bounded(number, x.value, call.dtype) for number in (float(call["lambd"]), 0.0))
    size = Bounded(x.value.abs(), x.error)
    return (pointwise.where(pointwise.compared(size.value <= bound.value, size, bound), zero, x),)


RULES: dict[str, Rule] = {
    "aten.threshold.default": _threshold, "aten.softshrink.default": _softshrink, "aten.hardshrink.default": _hardshrink,
    **{f"aten.{name}.{overload}": _comparison for name in ("le", "lt", "ge", "gt", "eq", "ne") for overload in ("Tensor", "Scalar")},
    **dict.fromkeys(("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf"), _where),
    **dict.fromkeys(("aten.minimum.default", "aten.min.other"), _extreme(pointwise.smaller)),
    **dict.fromkeys(("aten.maximum.default", "aten.max.other"), _extreme(pointwise.larger)),
    "aten.clamp.default": _clamp("min", "max"), "aten.clamp_min.default": _clamp("min", ""), "aten.clamp_max.default": _clamp("", "max"),
    "aten.hardtanh.default": _clamp("min_val", "max_val"), "aten.relu6.default": _relu6,
    "aten.leaky_relu.default": _leaky_relu, "aten.floor.default": _floor,
    "aten.softplus.default": _function("softplus", _softplus, lambda call: 0.0),
    **dict.fromkeys(("aten.elu.default", "aten.selu.default", "aten.celu.default"), _function("elu", _elu, _elu_size)),
}
