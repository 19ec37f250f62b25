"""How the captured chain is searched: two descents in different orders, and at both ends the question whether the step still works."""

import statistics
import time
from abc import abstractmethod
from collections.abc import Callable

from attrs import evolve

from ..errors import AgentCompileError
from ..ir.decisions import ChainTrial
from ..ir.ranges import SLOWER
from ..ir.selection import SelectedStep
from .captured import Variant
from .chain_question import Alternative, ChainAnswer, ChainQuestion, Selections, changes, replaced
from .descent import Descent, Outcome, logged
from .paired import PAIRS, paired_ratio

PAIRS_EARLIER = 5  # at each earlier position


class ChainSearch:
    """Answers one question by variants of the step that whoever derives from it makes and times."""

    def __init__(self, question: ChainQuestion, phase: Callable[[str], None]) -> None:
        self.q, self.phase = question, phase
        self._refused: list[tuple[str, str, str, str]] = []
        self._trials: list[ChainTrial] = []
        self._slowest_s = 0.0  # of the trials

    @abstractmethod
    def captured(self, selections: Selections) -> Variant:
        """The step under these selections."""

    @abstractmethod
    def framework(self) -> Variant:
        """The step on the framework alone."""

    @abstractmethod
    def stand_at(self, position: int) -> None:
        """From now on variants are timed at ``position``, up to which the caches are filled."""

    @abstractmethod
    def is_lost(self) -> bool:
        """Whether the device is unusable, which ends this worker."""

    def sweep(self, began: float | None = None) -> ChainAnswer:
        """Descend within the budget, then in another order with what is left of it, and say what is fastest.

        ``began``: when the budget did, by ``time.monotonic``; None: now.
        """
        deadline = (time.monotonic() if began is None else began) + self.q.budget_s
        best = self.captured(self.q.selections)
        first_us = _median_us(best, PAIRS)
        started, best = self._sound(self.q.selections, best)
        begun = best
        first = self._descent(started, best, deadline)
        first.run(self.q.alternatives, self.q.covers)
        self._trials += first.trials
        held, best = self._in_other_order(started, best, first, deadline)
        us = _median_us(best, PAIRS)
        sound, best = self._sound(held, best)
        if sound is not held:
            held, us = sound, _median_us(best, PAIRS)
        earlier = self._earlier(best, begun)
        framework_us = self._framework_us() if self.q.with_framework else 0.0
        tried = sum(trial.alone for trial in first.trials)
        accepted = sum(trial.taken and bool(trial.ratio) for trial in self._trials)
        return ChainAnswer(selections=held, us=us, first_us=first_us, framework_us=framework_us, tried=tried, accepted=accepted,
                           refused=tuple(self._refused), trials=tuple(self._trials), earlier=earlier)

    def _earlier(self, best: Variant, begun: Variant) -> tuple[tuple[int, float], ...]:
        """Earlier positions, nearest first, with what ``best`` takes there over ``begun``, up to the first at which it is slower: where it
        was not chosen it may lose, since work is dealt out in rounds. None if a step was taken out, which holds nowhere any more."""
        if not self.q.earlier or best is begun or any(trial.taken and not trial.ratio for trial in self._trials):
            return ()
        found: list[tuple[int, float]] = []
        for position in reversed(self.q.earlier):
            self.phase(f"from position {position} on")
            self.stand_at(position)
            best.sample_us()  # the caches of the device hold another position's rows
            found.append((position, statistics.median(best.sample_us() / begun.sample_us() for _ in range(PAIRS_EARLIER))))
            if found[-1][1] > SLOWER:
                break
        self.stand_at(self.q.position)
        return tuple(found)

    def _in_other_order(self, started: Selections, start: Variant, first: Descent, deadline: float) -> tuple[Selections, Variant]:
        """The end of a second descent from ``start``, with the steps in another order, where it is faster than that of the first one.

        Its own trials lead to nothing that is held, unless its end is; then one trial says all that it changes.
        """
        alternatives = first.in_other_order(self.q.alternatives) if first.taken else ()
        stop_at = deadline - self._slowest_s  # both ends are compared within the budget
        if not alternatives or time.monotonic() > stop_at:
            return first.held, first.best
        second = self._descent(started, start, stop_at)
        second.run(alternatives, first.near(self.q.covers))
        different = changes(first.held, second.held) if second.taken else ()
        if not different or time.monotonic() > deadline:
            return first.held, first.best
        outcome = self._compared(second.best, first.best)
        self._trials.append(logged(different, outcome))
        return (first.held, first.best) if outcome.winner is None else (second.held, second.best)

    def _descent(self, started: Selections, start: Variant, stop_at: float) -> Descent:
        return Descent(self._try_out, started, start, self.q.regions, stop_at, (*self.q.selections, *self.q.covers))

    def _try_out(self, challenger: Selections, best: Variant, what: tuple[Alternative, ...]) -> Outcome:
        self.phase(" with ".join(map(str, what)))
        began = time.monotonic()
        captured = self._captured_or_none(challenger)
        outcome = Outcome() if captured is None else self._compared(captured, best)
        if outcome.refused and len(what) == 1 and what[0].selected is not None:
            self._refuse(what[0].signature, what[0].selected, outcome.refused)
        self._slowest_s = max(self._slowest_s, time.monotonic() - began)
        return outcome

    def _compared(self, challenger: Variant, best: Variant) -> Outcome:
        """The ratio of two variants, and what is wrong with a challenger that would win by it."""
        ratio = paired_ratio(challenger, best, self.q.margin)
        wins = ratio < 1.0 - self.q.margin
        why = challenger.wrong() if wins else ""
        return Outcome(ratio=ratio, refused=why, winner=challenger if wins and not why else None)

    def _sound(self, held: Selections, best: Variant) -> tuple[Selections, Variant]:
        """What is held if it still does its work, else without the step that does not; without any if that is not one alone."""
        why = best.wrong()
        if not why:
            return held, best
        removals = [Alternative(signature=s.signature, match_id=x.step.match_id, selected=None) for s in held for x in s.steps]
        for removal in removals:
            self.phase(f"without {removal.match_id}")
            challenger = replaced(held, removal)
            captured = self._captured_or_none(challenger)
            if captured is None or _fails_when_timed(captured):
                continue
            step = next(x for s in held if s.signature == removal.signature for x in s.steps if x.step.match_id == removal.match_id)
            self._take_out(removal.signature, step, why)
            return challenger, captured
        for selection in held:
            for step in selection.steps:
                self._take_out(selection.signature, step, why)
        nothing = tuple(evolve(s, steps=()) for s in held)
        return nothing, self.captured(nothing)

    def _take_out(self, signature: str, step: SelectedStep, why: str) -> None:
        self._refuse(signature, step, why)
        self._trials.append(ChainTrial(signature=signature, match_id=step.step.match_id, step=None, refused=why, taken=True))

    def _refuse(self, signature: str, step: SelectedStep, why: str) -> None:
        self._refused.append((signature, step.step.match_id, str(step.step), f"after it was timed inside the captured chain, {why}"))

    def _captured_or_none(self, selections: Selections) -> Variant | None:
        try:
            return self.captured(selections)
        except AgentCompileError:
            return None
        except (Exception, SystemExit):  # an implementation may raise anything
            if self.is_lost():
                raise
            return None

    def _framework_us(self) -> float:
        self.phase("framework")
        try:
            framework = self.framework()
        except (Exception, SystemExit):
            if self.is_lost():
                raise
            return 0.0  # what cannot be captured is no bar for what can
        return _median_us(framework, 3)


def _median_us(variant: Variant, samples: int) -> float:
    return statistics.median(variant.sample_us() for _ in range(samples))


def _fails_when_timed(captured: Variant) -> str:
    captured.sample_us()
    return captured.wrong()
