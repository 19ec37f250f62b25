"""A value in float64 with the largest error that a correct computation of it may have."""

import math

import torch
from attrs import frozen
from torch import Tensor

from ...ir.graph import DType
from ..dtypes import torch_dtype

U32 = 2.0**-24  # unit roundoff of the accumulators
TAIL = 2.0  # independent bounds add up like the root of the sum of their squares; a bound is 2.7 standard deviations of a rounding
SPREAD = 0.9  # of an accumulator that adds d terms one by one: its error over the root of d, the unit and the size of its sums
STORED = 1.1  # of a rounding to the element type: what is stored may lie a little beside what was exactly computed
BESIDE = 1.5  # what sums that one product makes large err more: it may come first, and lie just above a power of two
COUNTED_IN = 2**6  # results among which the worst is one that a bound has room for
WORST_PER_DOUBLING = 0.045  # as fast as errors of sums one by one get rarer: a fifth of them for each tenth of their bound
F32_MAX = float(torch.finfo(torch.float32).max)
UNIT_ROUNDOFF = {DType.F64: 2.0**-53, DType.F32: 2.0**-24, DType.F16: 2.0**-11, DType.BF16: 2.0**-8}
# Half of the smallest subnormal: the most that rounding a tiny number can lose.
TINY = {DType.F64: 0.0, DType.F32: 2.0**-150, DType.F16: 2.0**-25, DType.BF16: 2.0**-134}


@frozen(eq=False)
class Bounded:
    """``value``: float64, or int64/bool for indices; ``error``: float64 of the same shape, never negative.

    Zero error means that only the very same number is right. An error that is not finite, beside a value that is, means
    that nothing is known of the element: an intermediate result may have left its type's range, and what a kernel that
    keeps it in a wider type gets is as right as the framework's infinity. ``choices`` (an index that an argmax chose):
    over the last axis of what was searched, True where the error bounds allow the maximum to be; of several that a topk chose one such
    row for each [indices, searched], and they must differ. ``read_from``: the type of the tensor that ``value`` was read from as it
    was, so that nothing in it can lie outside that type's range. ``before`` and ``rest``: what lies in front of ``value`` and behind it
    in the memory of a result, in its own type, of which the very bits are demanded.
    """

    value: Tensor
    error: Tensor
    choices: Tensor | None = None
    read_from: torch.dtype | None = None
    rest: Tensor | None = None
    before: Tensor | None = None

    @property
    def is_exact(self) -> bool:
        """Whether no element may have any error."""
        return not bool(self.error.any())


def exact(tensor: Tensor, dtype: torch.dtype | None = None) -> Bounded:
    """``tensor`` as it is, without error: floats as float64, everything else unchanged. ``dtype``: its own, if not ``tensor``'s."""
    value = tensor.double() if tensor.is_floating_point() else tensor
    none = torch.zeros((), dtype=torch.float64, device=tensor.device).expand(value.shape)
    return Bounded(value, none, read_from=dtype or tensor.dtype)


def times(slope: Tensor, error: Tensor) -> Tensor:
    """``slope * error``, and nothing where there is no error, however steep the slope."""
    return torch.where(error == 0, 0.0, slope * error)


def overflow_limit(dtype: torch.dtype) -> float:
    """The smallest magnitude that rounds to infinity in ``dtype``."""
    limits = torch.finfo(dtype)
    return float(limits.max) * (1.0 + limits.eps / 4.0)


def consumed(stored: Bounded, dtype: DType) -> Bounded:
    """A stored intermediate as the next operator reads it: nothing is known of what may have become infinite in ``dtype``."""
    if not dtype.is_float or dtype is DType.F64 or stored.read_from == torch_dtype(dtype):
        return stored
    lost = stored.value.isfinite() & (stored.value.abs() + stored.error >= overflow_limit(torch_dtype(dtype)))
    return Bounded(stored.value, torch.where(lost, torch.inf, stored.error), stored.choices) if bool(lost.any()) else stored


def sum_size(total: Tensor, absolute: Tensor, squares: Tensor) -> Tensor:
    """How large the partial sums of a sum are: at most the sum of magnitudes, and for terms in no order that the data knows
    about the result plus a walk of the terms' root of squares."""
    return torch.minimum(absolute, total.abs() + TAIL * squares.sqrt())


def dominance(squares: Tensor, size: Tensor) -> Tensor:
    """How far one term is all of a sum of that size: 0 where terms are many, 1 where it is alone. Partial sums are then large early."""
    return (TAIL * squares.sqrt() / size - 1.0).nan_to_num(nan=0.0).clamp(0.0, 1.0)


def worst_among(count: int) -> float:
    """What the worst of ``count`` honest sums errs more than that of a few; at least 1.

    Of sums of random products, added one by one, one in a million comes to 0.9 of their bound; each factor of ten adds 0.15 of it.
    """
    return 1.0 + WORST_PER_DOUBLING * max(0.0, math.log2(count / COUNTED_IN))


def in_blocks(depth: int, roots: float = 4.0) -> float:
    """The depth of a plain sum over a row: everyone computes these in blocks, of at most so many roots of the length."""
    return min(float(depth), roots * depth**0.5)


def overflowing(error: Tensor, size: Tensor) -> Tensor:
    """``error``, and infinite where partial sums of ``size`` may leave float32."""
    return torch.where(size.isfinite() & (size >= F32_MAX), torch.inf, error)


def representable(value: Tensor, dtype: DType) -> Tensor:
    """Where a float64 ``value`` is exactly a number of ``dtype`` (NaN counts)."""
    return (value.to(torch_dtype(dtype)).double() == value) | value.isnan()


def rounded(value: Tensor, error: Tensor, dtype: DType) -> Bounded:
    """What a correctly rounded store to ``dtype`` adds: ``1.1 u (|value| + error) + tiny``, or nothing where it is exact."""
    if not dtype.is_float:
        return Bounded(value, error)
    free = (error == 0) & representable(value, dtype)
    step = STORED * UNIT_ROUNDOFF[dtype] * (value.abs() + error) + TINY[dtype]
    return Bounded(value, torch.where(free, 0.0, error + step))


def computed(value: Tensor, error: Tensor, units: float | Tensor) -> Tensor:
    """``error`` plus ``units`` roundoffs of float32 arithmetic, where the exact result is not a float32 anyway."""
    free = (error == 0) & representable(value, DType.F32)
    return torch.where(free, 0.0, error + units * U32 * value.abs())
