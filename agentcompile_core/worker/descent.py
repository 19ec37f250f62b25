"""A descent through the alternatives of the chain: from some selections, change by change, until no change that it knows helps.

First other covers of a region, each as a whole; then each alternative alone, in the order given; then, until nothing changes, what came
close and was not tried since something else was taken, neighbours two at a time among it; then the same with the alternatives that come
later.
"""

import time
from collections.abc import Callable, Sequence

from attrs import frozen

from ..ir.decisions import ChainTrial
from ..ir.plan import Step
from ..ir.region import Region
from ..ir.selection import Selection
from .captured import Variant
from .chain_question import Alternative, Selections, holds, matches_of, replaced, toward
from .neighbours import NEAR, Key, replacements


@frozen(kw_only=True)
class Outcome:
    """Of one trial: the ratio to what is held (0: not compared), what is wrong with the challenger, and itself where it wins."""

    ratio: float = 0.0
    refused: str = ""
    winner: Variant | None = None


Cover = tuple[str, frozenset[str]]  # signature, match ids
TryOut = Callable[[Selections, Variant, tuple[Alternative, ...]], Outcome]  # a challenger, what is held, and what makes one of the other


class Descent:
    """What is held, and the trials that led there. ``stop_at`` (``time.monotonic``): no trial begins behind it. ``covers``: beside what is
    held, which steps of a region may be held together."""

    def __init__(self, try_out: TryOut, held: Selections, best: Variant, regions: Sequence[Region], stop_at: float,
                 covers: Selections = ()) -> None:
        self.held, self.best = held, best
        self.trials: list[ChainTrial] = []
        self.taken = 0
        self._try_out, self._regions, self._stop_at = try_out, regions, stop_at
        self._ratios: dict[Key, float] = {}  # of each step over what was held when it was tried last, 0 where that found nothing
        self._last: dict[tuple[object, ...], tuple[int, float]] = {}  # of each change: behind how many that were taken, and its ratio
        self._covers = [_cover(selection) for selection in (*held, *covers)]
        self._lost: set[Cover] = set()  # covers that lost by far

    def run(self, alternatives: Sequence[Alternative], covers: Selections = ()) -> None:
        """Descend, through other ``covers`` too; what comes later has its turn when the others are settled, so that a short time loses
        nothing by it."""
        first = [a for a in alternatives if not a.later]
        self._other_covers(covers)
        for some, known in ((first, first), ([a for a in alternatives if a.later], alternatives)):
            if some:
                self._sweep(some)
                self._settle(known, covers)

    def near(self, covers: Selections) -> Selections:
        """Those of ``covers`` that did not lose by far here."""
        return tuple(cover for cover in covers if _cover(cover) not in self._lost)

    def in_other_order(self, alternatives: Sequence[Alternative]) -> tuple[Alternative, ...]:
        """The steps last to first; without what lost by far here, and empty where there is no other order."""
        places: dict[tuple[str, str], list[Alternative]] = {}
        for alternative in alternatives:
            mine = places.setdefault(alternative.place, [])
            if self._may_win(alternative):
                mine.append(alternative)
        return tuple(a for mine in reversed(places.values()) for a in mine) if len(places) > 1 else ()

    def _is_over(self) -> bool:
        return time.monotonic() > self._stop_at

    def _sweep(self, alternatives: Sequence[Alternative]) -> None:
        for alternative in alternatives:
            if self._is_over():
                return
            if (not holds(self.held, alternative) and self._may_win(alternative) and not self._is_known((alternative,))
                    and self._fits(alternative)):
                self._change(alternative)

    def _fits(self, alternative: Alternative) -> bool:
        """Whether a cover has its match beside all that is held of its region."""
        together = matches_of(self.held, alternative.signature) | {alternative.match_id}
        return any(together <= matches for signature, matches in self._covers if signature == alternative.signature)

    def _other_covers(self, covers: Selections) -> None:
        for cover in self.near(covers):
            if self._is_over():
                return
            together = toward(self.held, cover)
            if together and not self._is_known(together):
                ratio = self._change(*together)
                if not 0.0 < ratio < NEAR:
                    self._lost.add(_cover(cover))

    def _settle(self, alternatives: Sequence[Alternative], covers: Selections) -> None:
        while True:
            before = self.taken
            self._sweep(alternatives)
            self._two_at_a_time(alternatives)
            self._other_covers(covers)
            if self.taken == before or self._is_over():
                return

    def _two_at_a_time(self, alternatives: Sequence[Alternative]) -> None:
        options = {(a.signature, a.selected.step): a for a in alternatives if a.selected is not None}
        for one, other in replacements(self.held, self._regions, {key: ratio for key, ratio in self._ratios.items() if key in options}):
            both = options[one], options[other]
            if self._is_over():
                return
            if not any(holds(self.held, a) for a in both) and not self._is_known(both):
                self._change(*both)

    def _may_win(self, alternative: Alternative) -> bool:
        """Whether what else has been replaced since may make up for what it lost by; not where it lost much, or was wrong."""
        last = self._last.get(_name((alternative,)))
        return last is None or 0.0 < last[1] < NEAR

    def _is_known(self, changes: tuple[Alternative, ...]) -> bool:
        """Whether they were tried beside everything that is held."""
        last = self._last.get(_name(changes))
        return last is not None and last[0] == self.taken

    def _change(self, *changes: Alternative) -> float:
        """Try them together and take them where they win; their ratio, 0 where something was wrong or nothing was compared."""
        challenger = self.held
        for alternative in changes:
            challenger = replaced(challenger, alternative)
        outcome = self._try_out(challenger, self.best, changes)
        ratio = 0.0 if outcome.refused else outcome.ratio
        self.trials.append(logged(changes, outcome))
        self._last[_name(changes)] = self.taken, ratio
        step = changes[0].step
        if len(changes) == 1 and step is not None:
            self._ratios[changes[0].signature, step] = ratio
        if outcome.winner is not None:
            self.held, self.best = challenger, outcome.winner
            self.taken += 1
        return ratio


def logged(changes: tuple[Alternative, ...], outcome: Outcome) -> ChainTrial:
    """What the log says of a trial that made all of ``changes``; where one is a step, the first one is."""
    what, *beside = changes
    return ChainTrial(signature=what.signature, match_id=what.match_id, ratio=outcome.ratio, refused=outcome.refused, step=what.step,
                      taken=outcome.winner is not None, beside=tuple((a.signature, a.step) for a in beside if a.step is not None),
                      without=tuple(a.place for a in beside if a.step is None))


def _name(changes: tuple[Alternative, ...]) -> tuple[tuple[str, str, Step | None], ...]:
    return tuple((a.signature, a.match_id, a.step) for a in changes)


def _cover(selection: Selection) -> Cover:
    return selection.signature, matches_of((selection,), selection.signature)
