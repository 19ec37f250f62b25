"""Error rules of pools: the largest element, or the mean, of every window."""

from collections.abc import Callable

import torch
from torch import Tensor

from .along_axes import floats
from .bounded import SPREAD, U32, Bounded, exact, overflowing
from .calls import Call

Rule = Callable[[Call], tuple[Bounded, ...]]
DIVISION = 2.0  # roundings of a division, or of a product with an inverse


def _again(call: Call, x: Tensor) -> Tensor:
    """The call on other elements."""
    found: Tensor = call.run(call.arguments | {"self": x})
    return found


def _largest(call: Call) -> tuple[Bounded, ...]:
    x = floats(call)
    value = _again(call, x.value)
    if x.is_exact:
        return (exact(value),)
    up, down = (_again(call, x.value + sign * x.error) - value for sign in (1.0, -1.0))
    return (Bounded(value, torch.where(value.isfinite(), torch.maximum(up, -down).nan_to_num(nan=torch.inf), 0.0)),)


def _mean(call: Call) -> tuple[Bounded, ...]:
    """As of any mean, whatever the windows divide by; partial sums are at most the sum of magnitudes."""
    x = floats(call)
    value, size, carried = _again(call, x.value), _again(call, x.value.abs()), _again(call, x.error.contiguous())
    given = call["kernel_size"]
    count = 1.0
    for extent in given:
        count *= extent
    error = carried + (SPREAD * count**0.5 + DIVISION) * U32 * size
    return (Bounded(value, overflowing(torch.where(value.isfinite(), error, 0.0), size * count)),)


RULES: dict[str, Rule] = {
    **{f"aten.max_pool{axes}d.default": _largest for axes in (1, 2, 3)}, **{f"aten.avg_pool{axes}d.default": _mean for axes in (1, 2, 3)},
}
