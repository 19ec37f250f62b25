"""Ranges of positions: what a decode step costs grows with what is cached, and other schedules win from some position on.

A selection that begins at a position holds in place of the one of its region before it, up to where the next one begins. A program
that begins there serves the steps from there on.
"""

import math
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


def judged(capacity: int, count: int) -> tuple[tuple[int, int], ...]:
    """The first ``count`` of ``starts``, each with the position at which it is judged. Where that is not all of them, the last one holds
    for everything behind it and is judged far inside, at the geometric mean of its ends."""
    found, every = [(start, middle(start, capacity)) for start in starts(capacity)], starts(capacity)
    if 0 < count < len(every):
        found[count - 1] = (every[count - 1], math.isqrt(every[count - 1] * capacity))
    return tuple(found[:count])


def middle(start: int, capacity: int) -> int:
    """The position at which the range from ``start`` is judged: half way to its end, or to that of the cache."""
    return start + (min(start * FACTOR, capacity) - start) // 2


def starts_of(selections: Iterable[Selection]) -> tuple[int, ...]:
    """Where something else is selected than before, 0 included."""
    return tuple(sorted({0, *(s.start for s in selections)}))


def beginnings(start: int, end: int) -> tuple[int, ...]:
    """Positions from ``start`` up to ``end`` at which a range may begin that was judged behind them: what wins there may lose nearby. They
    are those of ``starts`` and two and three times a power of two between them."""
    found, one = [], FIRST
    while one < end:
        found += [position for position in (one, one // 2 * 3) if start <= position < end]
        one *= 2
    return tuple(found)


def selected_from(selections: Iterable[Selection], start: int) -> dict[str, Selection]:
    """What holds at position ``start``, by signature."""
    return {s.signature: s for s in sorted(selections, key=lambda s: s.start) if s.start <= start}
