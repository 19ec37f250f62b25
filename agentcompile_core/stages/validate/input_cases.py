"""The input cases that a step is tried on: families of inputs, and the edges of the position where it has one."""

from collections.abc import Iterable

from ...ir import serial
from ...ir.advice import Risk
from ...ir.match_kinds import ARGMAX, ATTENTION, GATHER, ROPE_TABLE
from ...ir.region import Match
from ...ir.verdict import Case, InputFamily

F = InputFamily
_FAMILIES = (F.NORMAL, F.INTEGERS, F.NORMAL_LARGE, F.NORMAL_SMALL, F.ONE_HOT, F.SPIKY)
_EDGES = (0, 1, 31, 32, 33)
_TIMED_POSITIONS = 512  # as the kinds' ``state_bytes`` count them
_EMULATED_POSITIONS = 256
_RISKS = {
    Risk.RAGGED_TAIL: F.INTEGERS, Risk.MISALIGNED: F.INTEGERS, Risk.LARGE_VALUES: F.NORMAL_LARGE, Risk.CANCELLATION: F.SPIKY,
    Risk.LONG_REDUCTION: F.NORMAL, Risk.SHARED_MEMORY_RACE: F.NORMAL, Risk.REGISTER_PRESSURE: F.NORMAL,
}


def cases_for(match: Match, seed: str, risks: Iterable[Risk] = (), *, emulated: bool = False) -> tuple[Case, ...]:
    """Cases of a match; the first is the one that is timed. ``risks`` that an advisor named add one case each.

    ``seed`` is any text; equal text gives equal cases. ``emulated`` keeps positions small, since emulation is slow.
    """
    families = (*_FAMILIES, *(_RISKS[risk] for risk in risks))
    positions = _positions(match, emulated)
    first = int(serial.digest(seed, match.id, length=7), 16)
    count = max(len(families), len(positions))
    return tuple(Case(family=families[i % len(families)], seed=first + i, position=positions[i % len(positions)]) for i in range(count))


def _positions(match: Match, emulated: bool) -> tuple[int, ...]:
    if match.kind == ATTENTION:
        capacity = match.integer("capacity")
        last = min(capacity, _EMULATED_POSITIONS) - 1 if emulated else capacity - 1
        timed = max(0, min(capacity // 2, 40 if emulated else _TIMED_POSITIONS) - 1)
        window = match.integer("window", 0)
        edges = (timed, *_EDGES, last // 2, last, *((window - 1, window, window + 1) if window else ()))
        return tuple(dict.fromkeys(p for p in edges if p <= last))
    if match.kind == ROPE_TABLE:
        return (1000, 0, 1, 4095)
    return (1,) if match.kind in (ARGMAX, GATHER) else (3,)
