"""What a search tried and what it did not, and why: counts per match and implementation, as data for people and tools."""

import enum
from collections import Counter
from collections.abc import Iterable

from attrs import field, frozen

from .plan import PlanRisk, RegionPlan, Step, StepSpace
from .record import TuningRecord


class Reason(enum.Enum):
    """Why a schedule was not evaluated."""

    PLANS = "beyond the number of plans to evaluate"
    TIME = "the time was used up"
    ENDED = "an earlier search with the same budget ended before it, and its outcome is used again"
    SETTLED = "a rival served its nodes already, and nothing can be timed here"
    TOO_LARGE = "its match is too large for this backend"
    NO_COVER = "its match is in none of the covers that the planner kept"
    SAME_SOURCE = "it lowers to the same source and launches as another schedule"
    NOT_LOWERED = "its plugin could not lower it"
    NO_JUDGE = "nothing here can build and judge it"


@frozen(kw_only=True)
class Untried:
    """One step that was ordered and not evaluated."""

    signature: str
    step: Step
    reason: Reason


@frozen(kw_only=True)
class Tried:
    """One implementation of one match: the size of its space, and what became of its schedules. Counts add up to ``space``.

    ``refused`` is the implementation's own reason not to serve the match; ``broken`` what its plugin raised instead of an answer.
    ``ruled_out`` are schedules that the family left out of its space for want of hardware; ``risk`` is that of its best guess.
    """

    signature: str
    region: str
    match: str
    implementation: str
    version: int = 0
    space: int = 0
    evaluated: int = 0
    cached: int = 0  # of those evaluated: found in the store
    passed: int = 0
    untried: tuple[tuple[str, int], ...] = ()  # reason, schedules
    ruled_out: tuple[tuple[str, int], ...] = ()  # reason, schedules; no part of ``space``
    risk: PlanRisk = field(factory=PlanRisk)
    refused: str = ""
    broken: str = ""


@frozen(kw_only=True)
class Seen:
    """Everything that the rounds of a search left behind. Steps are pairs of region signature and step."""

    ordered: frozenset[tuple[str, Step]] = frozenset()
    lowered: frozenset[tuple[str, Step]] = frozenset()
    cached: frozenset[tuple[str, Step]] = frozenset()
    untried: tuple[Untried, ...] = ()


def tried(plans: Iterable[RegionPlan], records: Iterable[TuningRecord], seen: Seen) -> tuple[Tried, ...]:
    """One entry per match and implementation of every space: served, refused or broken."""
    by_step = {(r.signature, r.step): r for r in records}
    why = {(u.signature, u.step): u.reason for u in seen.untried}
    found: list[Tried] = []
    for plan in plans:
        region, space = plan.region.name, plan.space
        covered = {match for cover in space.covers for match in cover.matches}
        found += [_served(region, space.signature, one, one.match_id in covered, by_step, why, seen) for one in space.steps]
        found += [Tried(signature=space.signature, region=region, match=match, implementation=name, refused=reason)
                  for match, name, reason in space.rejects]
        found += [Tried(signature=space.signature, region=region, match=match, implementation=name, broken=message)
                  for match, name, message in space.broken]
    return tuple(found)


def _served(region: str, signature: str, space: StepSpace, covered: bool, records: dict[tuple[str, Step], TuningRecord],
            why: dict[tuple[str, Step], Reason], seen: Seen) -> Tried:
    counts: Counter[str] = Counter()
    evaluated = cached = passed = 0
    for point in space.space.points:
        place = (signature, Step(match_id=space.match_id, implementation=space.implementation, origin=space.origin, schedule=point))
        record = records.get(place)
        if record is None:
            counts[_reason(place, covered, why, seen).value] += 1
            continue
        evaluated += 1
        cached += place in seen.cached
        passed += record.passed
    return Tried(signature=signature, region=region, match=space.match_id, implementation=space.implementation, version=space.version,
                 space=len(space.space), evaluated=evaluated, cached=cached, passed=passed, untried=tuple(sorted(counts.items())),
                 ruled_out=space.space.ruled_out, risk=space.risk)


def _reason(place: tuple[str, Step], covered: bool, why: dict[tuple[str, Step], Reason], seen: Seen) -> Reason:
    if place in why:
        return why[place]
    if place in seen.ordered:
        return Reason.TIME if place in seen.lowered else Reason.NOT_LOWERED
    return Reason.PLANS if covered else Reason.NO_COVER
