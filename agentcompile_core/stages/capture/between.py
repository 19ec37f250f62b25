"""A value whose integers follow a straight line in the size that it was made for: known at two sizes, derived at a third one."""

from functools import cache
from typing import Any, TypeVar

import attrs
from attrs import frozen

T = TypeVar("T")


class Unlike(Exception):
    """Two values differ in more than integers on a line, or something could not be looked at closely enough to say."""


@frozen(kw_only=True)
class Line:
    """``low`` and ``high``: the sizes that are known; ``wanted``: the one that is derived."""

    low: int
    high: int
    wanted: int

    def at(self, low: int, high: int) -> int:
        """The integer at the wanted size of what is ``low`` and ``high`` at the known ones.

        Raises:
            Unlike: its slope is no integer. Shapes, strides and offsets are sums of multiples of the size; what is rounded or
                cut off somewhere between the two sizes almost never has such a slope.
        """
        slope, rest = divmod(high - low, self.high - self.low)
        if rest:
            raise Unlike(f"{low} at {self.low} and {high} at {self.high} lie on no line with an integer slope")
        return low + slope * (self.wanted - self.low)


def between(low: T, high: T, line: Line) -> T:
    """What ``low`` and ``high`` are at the wanted size: nested attrs instances and tuples whose integers alone may differ.

    Raises:
        Unlike: they have another structure, or differ in something else than integers with an integer slope.
    """
    kind: Any = type(low)
    if kind is not type(high):
        raise Unlike(f"{kind.__name__} and {type(high).__name__}")
    if kind is str and low == high:
        return low
    if kind is int:
        return low if low == high else line.at(low, high)  # type: ignore[arg-type, return-value]
    if kind is tuple:
        return _items_between(low, high, line)  # type: ignore[arg-type, return-value]
    names = _fields(kind)  # type: ignore[arg-type]
    if names:
        made: T = kind(**{name: between(getattr(low, name), getattr(high, name), line) for name in names})
        return made
    if repr(low) != repr(high):  # 0.0 and -0.0 are two numbers; a NaN is itself
        raise Unlike(f"{low!r} and {high!r}")
    return low


def _items_between(low: tuple[Any, ...], high: tuple[Any, ...], line: Line) -> tuple[Any, ...]:
    if len(low) != len(high):
        raise Unlike(f"{len(low)} and {len(high)} items")
    return tuple([between(a, b, line) for a, b in zip(low, high, strict=True)])


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(attribute.name for attribute in attrs.fields(kind)) if attrs.has(kind) else ()
