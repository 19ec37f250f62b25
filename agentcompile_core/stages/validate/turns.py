"""Whose turn it is: the match at which a run of the program spends most beyond its floor, by what has been measured so far.

A budget that ends early is then spent where time can be won: not on matches that no good cover holds, nor on kernels that are as fast as
memory allows.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from ...ir.advice import OrderedPlan
from ...ir.framework_time import Nodes, by_parts, levelled, working_nodes
from ...ir.record import TuningRecord
from ...ir.target import Target
from .entries import Entry, Place

OUTSIDE = 0.125  # of the loss of what it would replace: how much a match outside of the best cover promises
FIRST = 2  # candidates of each match of the best cover that come before all else: no other is at hand where the chain wants one. As many
# failures, and nothing that passed, make it likely that the match has none: often all of its candidates fail alike, in one case
FIRST_AGAIN = 5  # and of those that are judged again in later ranges of positions, where others win than at the first
UNTIMED_SHARE = 0.15  # of its floor, and a microsecond a launch: what a match is taken to lose before anything of it is timed
UNTIMED_US = 1.0
LEAST_S = 1e-3  # that a candidate is taken to cost


class Known(Protocol):
    """What is known so far: a ledger."""

    best_us: dict[Place, float]
    baselines: dict[Place, TuningRecord]
    seconds: dict[Place, float]  # that the last candidate of a match took

    def knows(self, entry: Entry) -> bool:
        """Whether the entry has a record."""


class Turns:
    """Gives every one of ``entries`` once, those of a match in their order; ``tried`` says how many of each match there were before,
    ``again`` which matches are judged again in later ranges of positions.

    The best cover of a region is the one whose measured steps save most, at first the favourite. Its matches come first, twice each, and
    five times those that are judged ``again``. Where nothing of a match passes, another cover that serves its nodes stands in: once all
    of the best one had their first turn, its matches come before second ones, so that a short search leaves nothing to the framework.
    Behind them comes the match with the largest loss (the time of its best kernel beyond its floor, in all instances) over the number of
    candidates that it has had, since each further one finds less, and over the seconds that one takes. Others promise a part of what
    they could win in its place; as long as all that was evaluated of a match of the best cover has failed, they count as much.
    """

    def __init__(self, entries: Sequence[Entry], ordered: Sequence[OrderedPlan], known: Known, target: Target,
                 tried: Counter[Place], again: frozenset[Place] = frozenset()) -> None:
        self._again = again
        self._ordered = {one.signature: one for one in ordered}
        self._known, self._tried = known, Counter(tried)
        self._queues: dict[Place, deque[Entry]] = {}
        for entry in entries:
            self._queues.setdefault(entry.place, deque()).append(entry)
        self._target = target
        self._awaited: dict[Place, list[Entry]] = {place: [] for place in self._queues}

    def __iter__(self) -> Iterator[Entry]:
        while self._queues:
            ranked = {signature: self._ranked_covers(one) for signature, one in self._ordered.items()}
            best = {signature: covers[0] for signature, covers in ranked.items()}
            first = {signature: best[signature] | self._standing_in(one, ranked[signature]) for signature, one in self._ordered.items()}
            opened = {signature for signature, cover in best.items() if any(self._failed((signature, match)) for match in cover)}
            place = max(self._queues, key=lambda place: self._promise(place, best, first, opened))  # the first of equals
            entry = self._queues[place].popleft()
            if not self._queues[place]:
                del self._queues[place]
            self._tried[place] += 1
            self._awaited[place].append(entry)
            yield entry

    def _ranked_covers(self, one: OrderedPlan) -> list[frozenset[str]]:
        """The covers of a region by what their measured steps save, the best first, equal ones as the planner ranks them."""
        covers = [(frozenset(one.primary), 0), *((frozenset(c.matches), 1 + c.rank) for c in one.plan.space.covers)]
        nodes, best_us = working_nodes(one.plan.region), {match: us for (signature, match), us in self._known.best_us.items()
                                                          if signature == one.signature}
        told_us = {match: us for match, us in self._told_us(one, nodes).items() if us > best_us.get(match, math.inf)}
        framework_us = levelled([cover for cover, _ in covers], told_us, nodes)
        worth = {rank: us - sum(best_us[match] for match in cover if match in told_us)
                 for (cover, rank), us in zip(covers, framework_us, strict=True)}
        return [cover for cover, _ in sorted(covers, key=lambda each: (-worth[each[1]], each[1]))]

    def _standing_in(self, one: OrderedPlan, ranked: Sequence[frozenset[str]]) -> frozenset[str]:
        """Of a best cover with matches of which nothing passes: the one that leaves the fewest of their nodes; else nothing."""
        wrong = {match for cover in ranked for match in cover if self._is_hopeless((one.signature, match))}
        if wrong.isdisjoint(ranked[0]):
            return frozenset()
        nodes = working_nodes(one.plan.region)
        lost = frozenset[str]().union(*(nodes[match] for match in ranked[0] & wrong))

        def left(cover: frozenset[str]) -> int:
            return len(lost.difference(*(nodes[match] for match in cover - wrong)))

        found = min(ranked, key=left)  # the first of equals
        return found if left(found) < len(lost) else frozenset()

    def _told_us(self, one: OrderedPlan, nodes: Nodes) -> dict[str, float]:
        """The framework's time of the matches of a region, where it is known."""
        records = ((match, self._known.baselines.get((one.signature, match))) for match in nodes)
        measured_us = {match: record.measurement.us for match, record in records if record is not None and record.measurement is not None}
        return by_parts(measured_us, nodes)

    def _failed(self, place: Place) -> bool:
        """Whether something of the match was evaluated, and nothing of it passed."""
        return place not in self._known.best_us and any(self._known.knows(entry) for entry in self._awaited.get(place, ()))

    def _is_hopeless(self, place: Place) -> bool:
        """Whether as many of the match as come first were evaluated, or all that there are, and nothing of it passed."""
        if place in self._known.best_us:
            return False
        done = sum(self._known.knows(entry) for entry in self._awaited.get(place, ()))
        return done >= FIRST or (done > 0 and place not in self._queues and done == len(self._awaited[place]))

    def _promise(self, place: Place, best: dict[str, frozenset[str]], first: dict[str, frozenset[str]],
                 opened: set[str]) -> tuple[int, bool, float]:
        """What to compare: of those that come ``first`` the turn, with that of a first one of the best cover highest, and whether it is to
        bring what another one failed to; then what may be won per second."""
        signature, match = place
        tried, inside = self._tried[place], match in best[signature]
        effort = (1 + tried) * self._seconds(place)
        comes_first = match in first[signature] and tried < (FIRST_AGAIN if place in self._again else FIRST)
        if inside or comes_first or signature in opened:
            turn = 0 if not comes_first else max(1, FIRST - tried) if inside else 1
            lacking = comes_first and tried < FIRST and (self._failed(place) or (tried == 0 and not inside))
            return turn, lacking, self._loss_us(place) / effort
        matches = self._ordered[signature].plan.region.match_by_id
        rivals = [(signature, other) for other in best[signature] if not set(matches[match].nodes).isdisjoint(matches[other].nodes)]
        return 0, False, OUTSIDE * sum(self._loss_us(rival) for rival in rivals or [place]) / effort

    def _seconds(self, place: Place) -> float:
        """What one candidate of the match takes; of one that had none yet, as others do."""
        known = self._known.seconds
        return max(LEAST_S, known.get(place, sum(known.values()) / max(1, len(known))))

    def _loss_us(self, place: Place) -> float:
        """What a run of the program spends on a match beyond its floor, a guess where nothing of it is timed."""
        region = self._ordered[place[0]].plan.region
        instances, us = len(region.instances), self._known.best_us.get(place)
        floor_us = self._target.floor_us(region.match_by_id[place[1]].bytes_moved * instances)
        return UNTIMED_SHARE * floor_us + UNTIMED_US * instances if us is None else max(0.0, us * instances - floor_us)
