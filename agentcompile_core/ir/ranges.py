"""Ranges of positions: what a decode step costs grows with what is cached, and other schedules win from some position on.

A selection that begins at a position holds in place of the one of its region before it, up to where the next one begins. A program
that begins there serves the steps from there on.
"""

import math
from collections.abc import Iterable, Sequence

from .selection import Selection

FIRST = 1024  # positions of the first range: below it the steps of the whole model are chosen
FACTOR = 4  # each further range is asked for from so many times the position of the one before on
LEAST = 1.5  # times its first position: a cache that ends before that is no range
SLOWER = 1.003  # times what held before: by less it is no slower, as far as a few pairs tell
WORTH = 1.125  # times where a range begins in the end: a cache that ends before that is worth no program


def starts(capacity: int) -> tuple[int, ...]:
    """From where on ranges behind the first one are asked for, in a cache of ``capacity`` positions: there they begin at the earliest."""
    found, start = [], FIRST
    while start * LEAST <= capacity:
        found.append(start)
        start *= FACTOR
    return tuple(found)


def judged(capacity: int, count: int) -> tuple[tuple[int, int], ...]:
    """The first ``count`` of ``starts``, each with the position at which it is judged. Where that is not all of them, the last one holds
    for everything behind it and is judged far inside: at the geometric mean of its ends, if that is further on."""
    found, every = [(start, inside(start, capacity)) for start in starts(capacity)], starts(capacity)
    if 0 < count < len(every):
        start, position = found[count - 1]
        found[count - 1] = (start, max(position, math.isqrt(start * capacity)))
    return tuple(found[:count])


def inside(start: int, capacity: int) -> int:
    """The position at which the range from ``start`` is judged: half way to where the next one begins; of the last one three quarters of
    the way to the end of the cache, which is made as long as requests are. What wins there does not hold where it loses."""
    following = start * FACTOR
    return (start + following) // 2 if following in starts(capacity) else start + (capacity - start) * 3 // 4


def starts_of(selections: Iterable[Selection]) -> tuple[int, ...]:
    """Where something else is selected than before, 0 included."""
    return tuple(sorted({0, *(s.start for s in selections)}))


def beginnings(start: int, end: int) -> tuple[int, ...]:
    """Positions from ``start`` up to ``end`` at which a range may begin: those of ``starts`` and, between them, twice and three times a
    power of two. What wins where a range is judged may lose at some of them."""
    found, one = [], FIRST
    while one < end:
        found += [position for position in (one, one // 2 * 3) if start <= position < end]
        one *= 2
    return tuple(found)


def holds_from(earlier: Sequence[tuple[int, float]], position: int) -> int:
    """From where on what was chosen at ``position`` is nowhere slower than what held before. ``earlier``: those before it, nearest first,
    with what it takes there over that; without any it holds from the first one on."""
    found = position if earlier else 0
    for before, ratio in earlier:
        if ratio > SLOWER:
            break
        found = before
    return found


def beginning(start: int, from_position: int, capacity: int) -> int | None:
    """Where the range that was asked for from ``start`` on begins, if what was chosen for it is to hold from ``from_position`` on; None: so
    near to the end of the cache that it is worth no program."""
    return next((one for one in beginnings(max(start, from_position), capacity) if one * WORTH <= capacity), None)


def selected_from(selections: Iterable[Selection], start: int) -> dict[str, Selection]:
    """What holds at position ``start``, by signature."""
    return {s.signature: s for s in sorted(selections, key=lambda s: s.start) if s.start <= start}
