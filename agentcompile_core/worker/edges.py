"""Inputs at the edges of what a type can hold, and with exact ties, large means and huge elements: few elements changed by seed."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..ir.graph import TensorSpec
from ..ir.verdict import Case, InputFamily
from ..ops.dtypes import torch_dtype

MEAN = 1024.0
DEVIATIONS = 4.0  # of LARGE_MEAN, in spacings of the type at the mean, and at least 1
HUGE = 2.0**14
TIED = 5  # elements that share the maximum
ENDS = 0.01  # share of elements at the ends of the range


def edged(tensor: Tensor, spec: TensorSpec, case: Case, generator: torch.Generator) -> Tensor:
    """A normal ``tensor`` with what its family puts into it; ``spec`` says the type that it will be stored in."""
    return EDGED[case.family](tensor, torch_dtype(spec.dtype), generator)


def _some(tensor: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Indices of ``count`` elements."""
    return torch.randint(0, max(1, tensor.numel()), (count,), generator=generator, device=tensor.device)


def _large_mean(tensor: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return MEAN + tensor * max(1.0, DEVIATIONS * MEAN * torch.finfo(dtype).eps)


def _large_mean_below(tensor: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return -_large_mean(tensor, dtype, generator)


def _ties(tensor: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return _put(tensor.clamp(max=3.0), _some(tensor, TIED, generator), 4.0)


def _one_huge(tensor: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return _put(tensor, _some(tensor, 1, generator), HUGE)


def _max_finite(tensor: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    chosen = _some(tensor, max(1, int(ENDS * tensor.numel())), generator)
    flat = tensor.float().reshape(-1)
    flat[chosen] = torch.finfo(dtype).max * torch.where(flat[chosen] < 0, -1.0, 1.0)
    return flat.reshape(tensor.shape)


def _nan(tensor: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return _put(tensor, _some(tensor, 1, generator), float("nan"))


def _infinite(tensor: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    plus, minus = _some(tensor, 2, generator)
    return _put(_put(tensor, minus, float("-inf")), plus, float("inf"))


def _put(tensor: Tensor, where: Tensor, value: float) -> Tensor:
    flat = tensor.reshape(-1).clone()
    flat[where] = value
    return flat.reshape(tensor.shape)


EDGED: dict[str, Callable[[Tensor, torch.dtype, torch.Generator], Tensor]] = {
    InputFamily.LARGE_MEAN: _large_mean, InputFamily.LARGE_MEAN_BELOW: _large_mean_below, InputFamily.TIES: _ties,
    InputFamily.ONE_HUGE: _one_huge, InputFamily.MAX_FINITE: _max_finite, InputFamily.NAN: _nan, InputFamily.INFINITE: _infinite,
}
