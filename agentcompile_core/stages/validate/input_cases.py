"""The input cases that a step is tried on: families of inputs, the positions of its kind, and those where its schedule ends a round."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from random import Random
from typing import Any

from ...ir import serial
from ...ir.advice import Risk
from ...ir.candidate import StepSource
from ...ir.graph import TensorSpec
from ...ir.plan import Schedule
from ...ir.region import Access, Match, Role
from ...ir.verdict import Case, InputFamily
from ...plugin.match_kind import EMULATED_POSITIONS, READS, MatchKind

F = InputFamily
_FAMILIES = (F.NORMAL, F.INTEGERS, F.NORMAL_LARGE, F.NORMAL_SMALL, F.ONE_HOT, F.SPIKY, F.LARGE_MEAN, F.TIES, F.ONE_HUGE, F.MAX_FINITE,
             F.NAN, F.INFINITE, F.ALL_MINUS_INF, F.LARGE_MEAN_BELOW)
_RISKS = {
    Risk.RAGGED_TAIL: F.INTEGERS, Risk.MISALIGNED: F.INTEGERS, Risk.LARGE_VALUES: F.NORMAL_LARGE, Risk.CANCELLATION: F.SPIKY,
    Risk.LONG_REDUCTION: F.NORMAL, Risk.SHARED_MEMORY_RACE: F.NORMAL, Risk.REGISTER_PRESSURE: F.NORMAL,
}
MOST_POSITIONS, MOST_EMULATED = 20, 8  # of those that a schedule asks for
MOST_PERIODS = 8
SHARED_ELEMENTS = 1 << 20  # weights of an emulated match beyond which all cases take the same: drawing them costs more than using them


def cases_for(match: Match, kind: MatchKind, seed: str, risks: Iterable[Risk] = (), *, emulated: bool = False,
              source: StepSource | None = None, schedule: Schedule | None = None) -> tuple[Case, ...]:
    """Cases of a candidate; the first is the one that is timed.

    Behind the fixed set of families and positions come the positions that ``source`` and ``schedule`` make special, drawn in
    the families that are ``kind``'s own, and one case for each of ``risks``: an advisor adds cases, and
    changes or removes none. ``seed`` is any text; equal text gives equal cases, whatever the schedule, where family and
    position are equal. ``emulated`` keeps positions small and few, since emulation is slow, and lets cases share large weights.
    """
    families = (*_FAMILIES, *kind.families)
    positions = kind.positions(match, emulated) or (0,)
    count = max(len(families), len(positions))
    pairs = [(families[i % len(families)], positions[i % len(positions)]) for i in range(count)]
    telling = kind.families or (F.NORMAL, F.INTEGERS)
    special = _special(match, kind, seed, source, schedule, emulated)
    # Families go round within a period, from where the period begins: schedules that have it share its references, and miss no family.
    pairs += [(telling[(_drawn(seed, match.id, period) + turn) % len(telling)], position) for position, (period, turn) in special.items()]
    pairs += [(family, max(positions)) for family in kind.lasting_families(match)]

    large = emulated and sum(o.spec.numel for o in match.operands if o.role is Role.WEIGHT) > SHARED_ELEMENTS
    weights_seed = _drawn(seed, match.id, kind.version, "weights") if large else 0

    def case(number: int, family: str, position: int, **said: Any) -> Case:
        drawn = _drawn(seed, match.id, kind.version, family, position, number)
        return Case(family=family, seed=drawn, position=position, weights_seed=weights_seed, **said)

    first, *others = _carriers(match, kind, positions[0]) or ("",)
    fixed = [case(0, family, position, carrier=first if family == F.NAN else "") for family, position in dict.fromkeys(pairs)]
    fixed += [case(1 + i, F.NAN, positions[0], carrier=carrier) for i, carrier in enumerate(others)]
    if first:  # and once more in an element that is read alone, which none of the others need be
        fixed.append(case(1 + len(others), F.NAN, positions[0], carrier=first, misaligned=True))
    fixed.append(case(0, F.INTEGERS, positions[-1], misaligned=True))  # at the addresses that the runtime promises, and no better
    ragged = [operand.name for operand in match.operands if operand.is_ragged]
    if len(ragged) > 1:  # who looks at one address only finds another one that is less
        fixed += [case(0, F.INTEGERS, positions[-1], misaligned=True, alone=name) for name in ragged]
    named = [case(1 + i, _RISKS[risk], positions[i % len(positions)], misaligned=risk is Risk.MISALIGNED) for i, risk in enumerate(risks)]
    return (*fixed, *named)


def _carriers(match: Match, kind: MatchKind, position: int) -> tuple[str, ...]:
    """The operands whose NaN a case shows: all of floating point that are read, one for each of their values, the main one first.

    Each has a case of its own: a NaN of ``x`` makes all of a row NaN, and with it whatever became of that of a scale or of a bias.
    """
    found: dict[tuple[tuple[str, ...], TensorSpec], str] = {}
    for operand in match.operands:
        said = kind.operand(operand.name)
        begun = said is None or said.filled_along is None or position > 0  # a state that is filled up to the position holds something
        if operand.role in (*READS, Role.STATE) and operand.access is not Access.WRITE and operand.spec.dtype.is_float and begun:
            found.setdefault((operand.values, operand.spec), operand.name)
    return tuple(found.values())


@lru_cache(maxsize=1 << 14, typed=True)  # candidates of one match ask for the same cases
def _drawn(*of: object) -> int:
    return int(serial.digest(*of, length=7), 16)


def schedule_positions(match: Match, kind: MatchKind, seed: str, source: StepSource | None, schedule: Schedule | None,
                       emulated: bool) -> tuple[int, ...]:
    """Positions around the ends of a schedule's rounds, boundaries first, then random ones; none where no length is read."""
    return tuple(_special(match, kind, seed, source, schedule, emulated))


def _special(match: Match, kind: MatchKind, seed: str, source: StepSource | None, schedule: Schedule | None,
             emulated: bool) -> dict[int, tuple[int, int]]:
    """Those positions, each with the period that it belongs to (0: none) and how many of that period come before it."""
    span = kind.span(match)
    if span <= 0:
        return {}
    last = min(span, EMULATED_POSITIONS) - 1 if emulated else span - 1
    periods = tuple(p for p in _periods(source, schedule) if 1 < p <= last)[:MOST_PERIODS]
    known = set(kind.positions(match, emulated))

    def random(period: int) -> Random:  # by the period alone: schedules that have it share its positions, and so their references
        return Random(serial.digest(seed, match.id, period))

    turns, found = Counter[int](), dict[int, tuple[int, int]]()
    for position, period in _around(periods, last, random):
        if 0 <= position <= last and position not in known:
            found.setdefault(position, (period, turns[period]))
            turns[period] += 1
    return dict(islice(found.items(), MOST_EMULATED if emulated else MOST_POSITIONS))


def _periods(source: StepSource | None, schedule: Schedule | None) -> Iterator[int]:
    """What the source states; else every integer of schedule and launches, then every product of two of them."""
    if source is not None and source.periods:
        yield from dict.fromkeys(source.periods)
        return
    integers = [v for _, v in (schedule.items if schedule is not None else ()) if isinstance(v, int) and not isinstance(v, bool)]
    for launch in source.launches if source is not None else ():
        integers += [launch.grid[0], launch.block[0]]
    several = sorted({n for n in integers if n > 1}, reverse=True)
    yield from dict.fromkeys((*several, *sorted({a * b for a in several for b in several if a is not b}, reverse=True)))


def _around(periods: tuple[int, ...], last: int, random: Callable[[int], Random]) -> Iterator[tuple[int, int]]:
    """Positions with their periods. A position p makes p + 1 positions: those with which rounds are just full, one short, and one over;
    and random ones."""
    picks: tuple[Callable[[int, int], int], ...] = (lambda period, most: 1, lambda period, most: most,
                                                   lambda period, most: random(period).randint(1, most))
    for pick in picks:
        for period in periods:
            end = pick(period, max(1, (last + 1) // period)) * period - 1
            yield from ((position, period) for position in (end, end + 1, end - 1))
    anywhere = random(0)
    yield from ((position, 0) for position in islice(iter(lambda: anywhere.randint(0, last), -1), MOST_POSITIONS))
