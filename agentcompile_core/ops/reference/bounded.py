"""A value in float64 with the largest error that a correct computation of it may have."""

import torch
from attrs import frozen
from torch import Tensor

from ...ir.graph import DType
from ..dtypes import torch_dtype

U32 = 2.0**-24  # unit roundoff of the accumulators
UNIT_ROUNDOFF = {DType.F64: 2.0**-53, DType.F32: 2.0**-24, DType.F16: 2.0**-11, DType.BF16: 2.0**-8}
# Half of the smallest subnormal: the most that rounding a tiny number can lose.
TINY = {DType.F64: 0.0, DType.F32: 2.0**-150, DType.F16: 2.0**-25, DType.BF16: 2.0**-134}


@frozen(eq=False)
class Bounded:
    """``value``: float64, or int64/bool for indices; ``error``: float64 of the same shape, never negative.

    Zero error means that only the very same number is right. ``choices`` (an index that an argmax chose): over the
    last axis of what was searched, True where the error bounds allow the maximum to be.
    """

    value: Tensor
    error: Tensor
    choices: Tensor | None = None

    @property
    def is_exact(self) -> bool:
        """Whether no element may have any error."""
        return not bool(self.error.any())


def exact(tensor: Tensor) -> Bounded:
    """``tensor`` as it is, without error: floats as float64, everything else unchanged."""
    value = tensor.double() if tensor.is_floating_point() else tensor
    return Bounded(value, torch.zeros((), dtype=torch.float64, device=tensor.device).expand(value.shape))


def representable(value: Tensor, dtype: DType) -> Tensor:
    """Where a float64 ``value`` is exactly a number of ``dtype`` (NaN counts)."""
    return (value.to(torch_dtype(dtype)).double() == value) | value.isnan()


def rounded(value: Tensor, error: Tensor, dtype: DType) -> Bounded:
    """What a correctly rounded store to ``dtype`` adds: ``1.001 u (|value| + error) + tiny``, or nothing where it is exact."""
    if not dtype.is_float:
        return Bounded(value, error)
    free = (error == 0) & representable(value, dtype)
    step = 1.001 * UNIT_ROUNDOFF[dtype] * (value.abs() + error) + TINY[dtype]
    return Bounded(value, torch.where(free, 0.0, error + step))


def computed(value: Tensor, error: Tensor, units: float | Tensor) -> Tensor:
    """``error`` plus ``units`` roundoffs of float32 arithmetic, where the exact result is not a float32 anyway."""
    free = (error == 0) & representable(value, DType.F32)
    return torch.where(free, 0.0, error + units * U32 * value.abs())
