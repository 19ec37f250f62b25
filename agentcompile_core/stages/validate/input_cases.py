"""The input cases that a step is tried on: families of inputs, and the edges of the position where it has one."""

from collections.abc import Iterable

from ...ir import serial
from ...ir.advice import Risk
from ...ir.region import Match
from ...ir.verdict import Case, InputFamily
from ...plugin.match_kind import MatchKind

F = InputFamily
_FAMILIES = (F.NORMAL, F.INTEGERS, F.NORMAL_LARGE, F.NORMAL_SMALL, F.ONE_HOT, F.SPIKY)
_RISKS = {
    Risk.RAGGED_TAIL: F.INTEGERS, Risk.MISALIGNED: F.INTEGERS, Risk.LARGE_VALUES: F.NORMAL_LARGE, Risk.CANCELLATION: F.SPIKY,
    Risk.LONG_REDUCTION: F.NORMAL, Risk.SHARED_MEMORY_RACE: F.NORMAL, Risk.REGISTER_PRESSURE: F.NORMAL,
}


def cases_for(match: Match, kind: MatchKind, seed: str, risks: Iterable[Risk] = (), *, emulated: bool = False) -> tuple[Case, ...]:
    """Cases of a match; the first is the one that is timed. ``risks`` that an advisor named add one case each.

    ``kind`` says which positions are tried and which input families of its own come behind the core's. ``seed`` is any
    text; equal text gives equal cases. ``emulated`` keeps positions small, since emulation is slow.
    """
    families = (*_FAMILIES, *kind.families, *(_RISKS[risk] for risk in risks))
    positions = kind.positions(match, emulated) or (0,)
    first = int(serial.digest(seed, match.id, kind.version, length=7), 16)
    count = max(len(families), len(positions))
    return tuple(Case(family=families[i % len(families)], seed=first + i, position=positions[i % len(positions)]) for i in range(count))
