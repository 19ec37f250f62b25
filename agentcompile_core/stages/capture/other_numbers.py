"""Arguments of the same shapes and types with other numbers, to call a module with before it is asked something."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .comparison import Arguments, random_inputs, tensors_among
from .dependence import turned

LARGE = 1e3

_Change = Callable[[Tensor], Tensor]


def drawn(given: Arguments, draw: int) -> Arguments:
    """``random_inputs``; the same ones where there are types and layouts that none can be drawn in."""
    try:
        return random_inputs(given, draw)
    except Exception:
        return given


def beside_tensors(given: Arguments) -> Arguments:
    """The same tensors beside other numbers and truth values of Python."""
    others: Arguments = pytree.tree_map(_beside, given)
    return others


def _beside(value: Any) -> Any:
    if type(value) is bool:
        return not value
    return value + 1 if type(value) in (int, float) else value


def backwards(given: Arguments) -> Arguments:
    """All numbers in the reverse order, of whole ones ``dependence.turned``: they add up to what they did."""
    return _mapped(given, _backwards)


def sides(given: Arguments) -> list[tuple[Arguments, ...]]:
    """Numbers on either side of whatever a module may have looked at, each with others for a module that does not take them.

    Floating point numbers are large, large and negative, and zero. Whole ones are the greatest or the least of their tensor throughout,
    which a table has; so are the others, which a check of bounds lets through.
    """
    found: list[tuple[Arguments, ...]] = [(_mapped(given, _filled(LARGE, _greatest)), _mapped(given, _greatest)),
                                          (_mapped(given, _filled(-LARGE, _least)), _mapped(given, _least))]
    if any(map(_is_continuous, tensors_among(given))):
        found.append((_mapped(given, _filled(0.0, _least)),))
    return found


def are_same(one: Arguments, other: Arguments) -> bool:
    """Whether they hold the same, as far as it can be compared."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(a is b or (_are_equal(a, b) if isinstance(a, Tensor) else repr(a) == repr(b)) for a, b in pairs)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    try:
        return bool(((one == other) | ((one != one) & (other != other))).all())
    except Exception:  # a layout or type without these operators: nothing was changed there
        return True


def _mapped(given: Arguments, change: _Change) -> Arguments:
    def changed(tensor: Tensor) -> Tensor:
        try:
            return change(tensor)
        except Exception:  # there are types and layouts that know no such operator
            return tensor

    mapped: Arguments = pytree.tree_map_only(Tensor, changed, given)
    return mapped


def _backwards(tensor: Tensor) -> Tensor:
    if _is_continuous(tensor):
        return tensor.flip(tuple(range(tensor.dim())))
    ((other,), _) = turned(((tensor,), {}))
    return other  # type: ignore[no-any-return]


def _filled(number: float, of_whole: _Change) -> _Change:
    return lambda tensor: torch.full_like(tensor, number) if _is_continuous(tensor) else of_whole(tensor)


def _greatest(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, tensor.max().item())


def _least(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, tensor.min().item())


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
