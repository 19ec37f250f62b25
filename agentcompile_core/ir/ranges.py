"""Ranges of positions: what a decode step costs grows with what is cached, and other schedules win from some position on.

A selection that begins at a position holds in place of the one of its region before it, up to where the next one begins. A program
that begins there serves the steps from there on.
"""

from collections.abc import Iterable

from .selection import Selection

FIRST = 1024  # positions of the first range: below it the steps of the whole model are chosen
FACTOR = 4  # each further range begins at so many times the position of the one before
LEAST = 1.5  # times its first position: a cache that ends before that is no range


def starts(capacity: int) -> tuple[int, ...]:
    """Where ranges behind the first one begin, in a cache of ``capacity`` positions."""
    found, start = [], FIRST
    while start * LEAST <= capacity:
        found.append(start)
        start *= FACTOR
    return tuple(found)


def middle(start: int, capacity: int) -> int:
    """The position at which the range from ``start`` is judged: half way to its end, or to that of the cache."""
    return start + (min(start * FACTOR, capacity) - start) // 2


def starts_of(selections: Iterable[Selection]) -> tuple[int, ...]:
    """Where something else is selected than before, 0 included."""
    return tuple(sorted({0, *(s.start for s in selections)}))


def selected_from(selections: Iterable[Selection], start: int) -> dict[str, Selection]:
    """What holds at position ``start``, by signature."""
    return {s.signature: s for s in sorted(selections, key=lambda s: s.start) if s.start <= start}
