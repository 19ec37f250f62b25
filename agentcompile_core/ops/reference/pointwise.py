"""Error rules of views and pointwise operators."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...ir.graph import DType
from .bounded import (
    SPREAD,
    STORED,
    TAIL,
    U32,
    UNIT_ROUNDOFF,
    Bounded,
    computed,
    exact,
    in_blocks,
    overflowing,
    representable,
    sum_size,
    times,
)

# Bound of the second derivative, for the curvature over the error interval.
_CURVATURE = {"silu": 0.5, "gelu": 0.8, "gelu_tanh": 0.9, "sigmoid": 0.1, "tanh": 0.8, "relu": 0.0, "cos": 1.0, "sin": 1.0,
              "erf": 1.0, "mish": 0.7, "log_sigmoid": 0.25, "softplus": 1.0, "hardswish": 1.0, "hardsigmoid": 0.0, "leaky_relu": 0.0,
              "elu": 0.0, "abs": 0.0}
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "cos": torch.cos,
    "sin": torch.sin,
    "exp": torch.exp,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
    "neg": torch.neg,
    "abs": torch.abs,
    "reciprocal": torch.reciprocal,
    "log": torch.log,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "erf": torch.erf,
    "mish": torch.nn.functional.mish,
    "log_sigmoid": torch.nn.functional.logsigmoid,
    "hardswish": torch.nn.functional.hardswish,
    "hardsigmoid": torch.nn.functional.hardsigmoid,
}
FLUSHED = 2.0**-125
MANY = 8.0  # roundings
ROOTS = 3.0  # of its length: the longest block of a plain sum
MULTIPLIED_OUT = 3.0  # powers beyond are computed by the library's pow
_EXACT = ("relu", "neg", "abs")  # no rounding of their own
_IN_STEPS = ("rsqrt",)  # on processors torch rounds the root to the element type and divides 1 by that, outside of whole vectors
_EXPONENTIAL = ("silu", "sigmoid", "exp", "expm1", "mish", "log_sigmoid", "softplus", "elu")
_CANCELLING = ("gelu", "gelu_tanh", "cos", "sin")
_FADING = ("silu", "sigmoid", "log_sigmoid")  # straight towards both sides
_SHARED = ("silu", "sigmoid")  # quotients by 1 + exp(-x), of which only a share errs as the exponential does
_KINKED = ("relu", "abs", "leaky_relu", "elu", "hardsigmoid", "hardswish")  # steeper, it may be, on the other side of a kink


def bounded(x: object, like: Tensor, dtype: DType = DType.F32) -> Bounded:
    """A number or a Bounded as a Bounded. The framework rounds a number to ``dtype``, that of the operation, or to float32."""
    if isinstance(x, Bounded):
        return x
    found = exact(torch.tensor(float(x), dtype=torch.float64, device=like.device))  # type: ignore[arg-type]
    return Bounded(found.value, torch.where(representable(found.value, dtype), 0.0, UNIT_ROUNDOFF[dtype] * found.value.abs()))


def unary(name: str, x: Bounded, function: Callable[[Tensor], Tensor] | None = None, dtype: DType = DType.F32) -> Bounded:
    """``name``(x): slope times error, curvature, and float32 arithmetic with fast exponentials.

    ``function``: what is computed, where the name has parameters; ``dtype``: what the framework may round to on the way.
    """
    function = function or _FUNCTIONS[name]
    value, slope = _slope(function, x.value)
    if name in _KINKED and not x.is_exact:
        for side in (x.value - x.error, x.value + x.error):
            slope = torch.maximum(slope, _slope(function, side)[1])
    error = times(slope, x.error)
    if name in _CURVATURE:
        error = error + 0.5 * _curvature(name, x) * x.error**2
    else:  # exp, rsqrt, ...: relative curvature; 1 + its relative input error covers it for small errors
        error = error * (1.0 + x.error / x.value.abs().clamp_min(1e-300)).clamp_max(2.0)
    if name not in _EXACT:
        error = error + _arithmetic(name, x.value, value)
    if name in _IN_STEPS:
        error = error + STORED * UNIT_ROUNDOFF[dtype] * value.abs()
    # Limits at infinity are exact, and so is what a pole gives.
    return Bounded(value, torch.where((x.error == 0) & ~(x.value.isfinite() & value.isfinite()), 0.0, error))


def _curvature(name: str, x: Bounded) -> Tensor | float:
    """The largest second derivative between the ends of ``x``; of those that fade at most ``(2 + |x|) exp(-|x|)`` as well."""
    if name not in _FADING:
        return _CURVATURE[name]
    nearest = (x.value.abs() - x.error).clamp_min(0.0)
    return ((2.0 + nearest) * (-nearest).exp()).nan_to_num(nan=torch.inf).clamp_max(_CURVATURE[name])


def _slope(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Value and absolute derivative; an unknown derivative is infinite. Whoever asks may be in inference mode."""
    with torch.inference_mode(False), torch.enable_grad():
        point = x.detach().double().clone().requires_grad_(True)
        value = function(point)
        slope = torch.autograd.grad(value.sum(), point)[0].abs()
    return value.detach(), slope.nan_to_num(nan=torch.inf)


def _arithmetic(name: str, x: Tensor, value: Tensor) -> Tensor:
    """What float32 adds: some roundings of the result (of the operand too, where it cancels), with fast exponentials."""
    scale = value.abs() + x.abs() if name in _CANCELLING else value.abs()
    share = torch.sigmoid(-x) if name in _SHARED else 1.0
    units = 5.0 + (1.25 * x.abs().clamp_max(128.0) * share if name in _EXPONENTIAL else 0.0)
    # Where exp(-x) leaves float32, quotients flush to zero: the fast division of some devices does from 2^126 on.
    return units * U32 * scale + FLUSHED * (1.0 + x.abs())


def add(a: Bounded, b: Bounded, alpha: float = 1.0, dtype: DType = DType.F32) -> Bounded:
    """a + alpha * b; ``dtype``: what the framework may round alpha to, and on processors rounds alpha * b to outside of whole vectors."""
    scaled = b if alpha == 1.0 else mul(b, bounded(alpha, b.value, dtype))
    if abs(alpha) != 1.0:
        kept = (scaled.error == 0) & representable(scaled.value, dtype)
        scaled = Bounded(scaled.value, torch.where(kept, 0.0, scaled.error + STORED * UNIT_ROUNDOFF[dtype] * scaled.value.abs()))
    value = a.value + scaled.value
    error = a.error + scaled.error
    # A sum of two nearby numbers keeps the absolute rounding of its operands' scale.
    return _known(a, b, Bounded(value, overflowing(computed(value, error.expand(value.shape), 1.0), scaled.value.abs())))


def mul(a: Bounded, b: Bounded, dtype: DType = DType.F32) -> Bounded:
    """a * b.

    Where both operands err by many roundings to ``dtype``, that is by sums, their tails do not meet: the smaller counts by 0.4.
    """
    value = a.value * b.value
    left, right = times(b.value.abs(), a.error), times(a.value.abs(), b.error)
    less = torch.minimum(left, right)
    summed = less > MANY * UNIT_ROUNDOFF[dtype] * value.abs()
    error = left + right - torch.where(summed & less.isfinite(), 0.6 * less, 0.0) + times(a.error, b.error)
    return _known(a, b, Bounded(value, computed(value, error, 1.0)))


def _known(a: Bounded, b: Bounded, made: Bounded) -> Bounded:
    """What is ``made`` of two operands; of an infinity beside an operand of which nothing is known, nothing is known either."""
    anything = ~(a.error.isfinite() & b.error.isfinite())
    if not bool(anything.any()):
        return made
    unknown = anything & ~made.value.isfinite() & ~a.value.isnan() & ~b.value.isnan()
    return Bounded(torch.where(unknown, 0.0, made.value), torch.where(unknown, torch.inf, made.error))


def div(a: Bounded, b: Bounded) -> Bounded:
    """a / b, for denominators well away from zero."""
    value = a.value / b.value
    low = (b.value.abs() - b.error).clamp_min(1e-300)
    error = (a.error + value.abs() * b.error) / low
    return Bounded(value, computed(value, error, 4.0))


def power(a: Bounded, exponent: float, dtype: DType = DType.F32) -> Bounded:
    """a ** exponent for a constant exponent; the framework multiplies small whole powers out, in ``dtype``."""
    if exponent == 2.0:
        return mul(a, a)
    value = a.value**exponent
    slope = (abs(exponent) * a.value.abs() ** (exponent - 1.0)).nan_to_num(nan=torch.inf)
    products = exponent - 2.0 if exponent == int(exponent) and 2 < exponent <= MULTIPLIED_OUT else 1.0 if exponent == -2.0 else 0.0
    inner = STORED * products * UNIT_ROUNDOFF[dtype]
    return Bounded(value, times(slope, a.error) + (16.0 * U32 + inner) * value.abs() + FLUSHED)


def mean(x: Bounded, dims: list[int], keepdim: bool, depth: int, divide: bool = True) -> Bounded:
    """Mean (or sum) over the axes ``dims``."""
    count = 1
    for d in dims:
        count *= x.value.shape[d]
    scale = count if divide else 1
    value = x.value.sum(dims, keepdim) / scale
    spread = (x.error**2).sum(dims, keepdim).sqrt() * TAIL
    error = torch.minimum(spread, x.error.sum(dims, keepdim)) / scale
    absolute = x.value.abs().sum(dims, keepdim)
    size = sum_size(value * scale, absolute, x.value.pow(2).sum(dims, keepdim))
    made = Bounded(value, overflowing(error + SPREAD * in_blocks(depth, ROOTS) ** 0.5 * U32 * size / scale, absolute))
    # Of an infinity beside an element of which nothing is known, nothing is known either: that one may be the other infinity.
    unknown = (x.value.isfinite() & ~x.error.isfinite()).sum(dims, keepdim).bool() & value.isinf()
    if not bool(unknown.any()):
        return made
    return Bounded(torch.where(unknown, 0.0, made.value), torch.where(unknown, torch.inf, made.error))


def larger(a: Bounded, b: Bounded) -> Bounded:
    """max(a, b): the error of the one that is surely larger, else that of either."""
    error = torch.where(a.value - a.error > b.value + b.error, a.error,
                        torch.where(b.value - b.error > a.value + a.error, b.error, torch.maximum(a.error, b.error)))
    return Bounded(torch.maximum(a.value, b.value), error)


def smaller(a: Bounded, b: Bounded) -> Bounded:
    """min(a, b)."""
    found = larger(Bounded(-a.value, a.error), Bounded(-b.value, b.error))
    return Bounded(-found.value, found.error)


def compared(value: Tensor, a: Bounded, b: Bounded) -> Bounded:
    """A comparison ``value`` of a and b as booleans; its error is 1 where their errors allow the other answer."""
    reach = a.error + b.error
    unsure = (reach > 0) & ~((a.value - b.value).abs() > reach) & ~(a.value.isnan() | b.value.isnan())
    return Bounded(value, unsure.double())


def where(condition: Bounded, a: Bounded, b: Bounded) -> Bounded:
    """a where the condition holds, else b; either, where the condition is not sure."""
    value = torch.where(condition.value, a.value, b.value)
    own, other = torch.where(condition.value, a.error, b.error), torch.where(condition.value, b.error, a.error)
    either = torch.maximum(own, (a.value - b.value).abs() + other)
    return Bounded(value, torch.where(condition.error > 0, either, own))


def floor(x: Bounded) -> Bounded:
    """The next whole number below; one more or less where the error of x reaches it."""
    value = x.value.floor()
    low, high = (x.value - x.error).floor(), (x.value + x.error).floor()
    return Bounded(value, torch.where(x.error == 0, 0.0, torch.maximum(high - value, value - low)))
