"""Error rules of views and pointwise operators."""

from collections.abc import Callable

import torch
from torch import Tensor

from .bounded import U32, Bounded, computed, exact

# Bound of the second derivative, for the curvature over the error interval.
_CURVATURE = {"silu": 0.5, "gelu": 0.8, "gelu_tanh": 0.9, "sigmoid": 0.1, "tanh": 0.8, "relu": 0.0, "cos": 1.0, "sin": 1.0}
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
}
FLUSHED = 2.0**-125
_EXACT = ("relu", "neg", "abs")  # no rounding of their own


def bounded(x: object, like: Tensor) -> Bounded:
    """A number or a Bounded as a Bounded."""
    if isinstance(x, Bounded):
        return x
    return exact(torch.tensor(float(x), dtype=torch.float64, device=like.device))  # type: ignore[arg-type]


def unary(name: str, x: Bounded) -> Bounded:
    """``name``(x): slope times error, curvature, and float32 arithmetic with fast exponentials."""
    point = x.value.double().detach().requires_grad_(True)
    with torch.enable_grad():
        value = _FUNCTIONS[name](point)
        slope = torch.autograd.grad(value.sum(), point)[0].abs()
    value = value.detach()
    error = slope * x.error
    if name in _CURVATURE:
        error = error + 0.5 * _CURVATURE[name] * x.error**2
    else:  # exp, rsqrt, ...: relative curvature; 1 + its relative input error covers it for small errors
        error = error * (1.0 + x.error / x.value.abs().clamp_min(1e-300)).clamp_max(2.0)
    if name in _EXACT:
        return Bounded(value, error)
    scale = value.abs() if name in ("silu", "sigmoid", "exp", "rsqrt", "sqrt", "reciprocal") else x.value.abs() + value.abs()
    # Where exp(-x) leaves float32, quotients flush to zero: the fast division of some devices does from 2^126 on.
    flushed = FLUSHED * (1.0 + x.value.abs())
    return Bounded(value, error + (8.0 + 2.0 * x.value.abs().clamp_max(128.0)) * U32 * scale + flushed)


def add(a: Bounded, b: Bounded, alpha: float = 1.0) -> Bounded:
    """a + alpha * b."""
    value = a.value + alpha * b.value
    error = a.error + abs(alpha) * b.error
    if alpha not in (1.0, -1.0):
        error = error + U32 * (alpha * b.value).abs()  # the product rounds too
    # A sum of two nearby numbers keeps the absolute rounding of its operands' scale.
    return Bounded(value, computed(value, error.expand(value.shape), 2.0))


def mul(a: Bounded, b: Bounded) -> Bounded:
    """a * b."""
    value = a.value * b.value
    error = a.value.abs() * b.error + b.value.abs() * a.error + a.error * b.error
    return Bounded(value, computed(value, error, 2.0))


def div(a: Bounded, b: Bounded) -> Bounded:
    """a / b, for denominators well away from zero."""
    value = a.value / b.value
    low = (b.value.abs() - b.error).clamp_min(1e-300)
    error = (a.error + value.abs() * b.error) / low
    return Bounded(value, computed(value, error, 4.0))


def power(a: Bounded, exponent: float) -> Bounded:
    """a ** exponent for a constant exponent."""
    if exponent == 2.0:
        return mul(a, a)
    value = a.value**exponent
    slope = (abs(exponent) * a.value.abs() ** (exponent - 1.0)).nan_to_num(posinf=0.0)
    return Bounded(value, slope * a.error + 16.0 * U32 * value.abs())


def mean(x: Bounded, dims: list[int], keepdim: bool, depth: int, divide: bool = True) -> Bounded:
    """Mean (or sum) over the axes ``dims``."""
    count = 1
    for d in dims:
        count *= x.value.shape[d]
    scale = count if divide else 1
    value = x.value.sum(dims, keepdim) / scale
    spread = (x.error**2).sum(dims, keepdim).sqrt() * 3.0
    error = torch.minimum(spread, x.error.sum(dims, keepdim)) / scale
    error = error + 2.0 * depth**0.5 * U32 * x.value.abs().sum(dims, keepdim) / scale
    return Bounded(value, error)
