"""Error rules of running sums and products: every element is the sum or the product of those up to it, in any order."""

import torch
from torch import Tensor

from .along_axes import SMALLEST, SMALLEST_NORMAL, floats
from .bounded import F32_MAX, TAIL, U32, Bounded
from .calls import Call

ANYWHERE, ANYWHERE_SUM = 2.5, 1.6  # as EVEN and SPREAD of whole ones: the farthest place of a walk is farther off than its end


def cumsum(call: Call) -> tuple[Bounded, ...]:
    """Partial sums are as large as the largest result so far and a walk of the terms' root of squares, at most the sum of magnitudes."""
    x = floats(call)
    dim = int(call["dim"])
    if not x.value.dim():
        return (x,)
    value, absolute = x.value.cumsum(dim), x.value.abs().cumsum(dim)
    walk = value.abs().nan_to_num(posinf=0.0).cummax(dim).values + TAIL * x.value.square().cumsum(dim).sqrt()
    size = torch.minimum(absolute, walk)
    carried = torch.minimum(TAIL * x.error.square().cumsum(dim).sqrt(), x.error.cumsum(dim))
    error = carried + ANYWHERE_SUM * _additions(x.value, dim).sqrt() * U32 * size
    lost = _so_far(absolute.isfinite() & (size >= F32_MAX) | (carried.isinf() & x.value.isfinite()), dim)
    return (_settled(value, error, lost),)


def cumprod(call: Call) -> tuple[Bounded, ...]:
    """As of one product per element: partial products may leave float32 in one order and not in another."""
    x = floats(call)
    dim = int(call["dim"])
    if not x.value.dim():
        return (x,)
    magnitude = x.value.abs().nan_to_num(posinf=1.0)
    largest = magnitude.clamp_min(1.0).log2().cumsum(dim)
    smallest = torch.where(magnitude > 0, magnitude, 1.0).clamp_max(1.0).log2().cumsum(dim)
    factors = _additions(x.value, dim)
    value = x.value.cumprod(dim)
    relative = ANYWHERE * factors.sqrt() * U32 + TAIL * (x.error / magnitude.clamp_min(1e-300)).square().cumsum(dim).sqrt()
    underflow = torch.where(smallest < SMALLEST_NORMAL, (factors + 1.0) * SMALLEST * largest.exp2(), 0.0)
    error = value.abs().nan_to_num(posinf=0.0) * relative + underflow
    zero = _so_far((x.value == 0) & (x.error == 0), dim) & (largest < 128.0) & value.isfinite()
    kept = torch.where(zero, 0.0, error)
    infinite, small = _so_far(x.value.isinf(), dim), (smallest < SMALLEST_NORMAL) | _so_far(x.error >= magnitude, dim)
    return (_settled(value, kept, (largest >= 128.0) | (infinite & small)),)


def _additions(x: Tensor, dim: int) -> Tensor:
    """How many results before it each element of a line is made from, in a shape that broadcasts."""
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    return torch.arange(x.shape[dim], dtype=torch.float64, device=x.device).reshape(shape)


def _so_far(happened: Tensor, dim: int) -> Tensor:
    return happened.to(torch.int8).cummax(dim).values.bool()


def _settled(value: Tensor, error: Tensor, lost: Tensor) -> Bounded:
    """NaN stays NaN and infinities are demanded as they are, unless what is ``lost`` may have become one in float32 before."""
    unknown = lost & ~value.isnan()
    bound = torch.where(unknown, torch.inf, torch.where(value.isfinite(), error, 0.0))
    return Bounded(torch.where(unknown & ~value.isfinite(), 0.0, value), bound)
