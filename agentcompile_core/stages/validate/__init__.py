"""Stage validate: candidates are built, judged and timed in the worker; what the store knows already is not done again."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from attrs import evolve

from ...budget import SPARE_SHARE
from ...context import Context
from ...garbage import uncollected
from ...ir.advice import OrderedPlan
from ...ir.baseline import FRAMEWORK
from ...ir.candidate import Candidate
from ...ir.evaluated import Evaluated
from ...ir.record import TuningRecord
from ...ir.search_log import Reason, Untried
from ...ir.selection import Selection
from ...plugin.events import SearchStarted, Skipped
from ...plugin.interfaces import Backend
from ...worker import Evaluation, Job
from . import final_checks, winners
from .entries import Entry, Place, Queue, environment, job_of
from .ledger import Ledger
from .resume import Search, spent_before
from .turns import Turns
from .twins import Twins


def run(candidates: tuple[Candidate, ...], ordered: tuple[OrderedPlan, ...], left_s: float, ctx: Context,
        earlier: tuple[TuningRecord, ...] = (), again: frozenset[Place] = frozenset()) -> Evaluated:
    """Evaluate ``candidates`` within ``left_s`` seconds; ``earlier`` are the records of the rounds before, ``again`` the matches that
    are judged again in later ranges of positions.

    Matches take turns, those of the favourite cover first, so that an early end finds every node served; where there is a clock,
    then those where most time can be won (``turns``).
    """
    if ctx.backend is None or not final_checks.installed(ctx):
        if ctx.backend is None:
            ctx.emit(Skipped(subject="validate", message="no backend can launch kernels here; nothing is validated or selected"))
        untried = tuple(Untried(signature=c.signature, step=c.step, reason=Reason.NO_JUDGE) for c in candidates)
        return Evaluated(candidates=candidates, untried=untried)
    return _Stage(ordered, ctx.backend, time.monotonic() + left_s, ctx).evaluated(candidates, earlier, again)


def confirm(selections: tuple[Selection, ...], found: Evaluated, rounds: Sequence[tuple[OrderedPlan, ...]],
            ctx: Context) -> tuple[tuple[Selection, ...], Evaluated]:
    """Have the validators of winners judge every selected step; see ``winners.confirmed``. Equal ``found``: all of them passed."""
    backend = ctx.backend
    if backend is None or not (final_checks.required(ctx) or final_checks.affordable(ctx)):
        return selections, found
    queues = [Queue(ordered, backend, ctx) for ordered in reversed(rounds)]

    def job(record: TuningRecord) -> Job | None:
        for candidate in (c for c in found.candidates if (c.signature, c.step) == (record.signature, record.step)):
            entries = (queue.entry_of(candidate) for queue in queues)
            entry = next((e for e in entries if e is not None and e.key == record.key), None)
            if entry is not None:
                return job_of(entry, backend, ctx)
        return None

    # A compilation that found everything in the store has no worker, and starts none for answers that nobody must have.
    soon = time.monotonic() + SPARE_SHARE * ctx.budget.total_s if ctx.running_worker().runs else 0.0
    in_time = ctx.budget.stop_at("winners")
    stop_at = math.inf if ctx.config.sanitize else in_time  # who asks for the sanitizer waits for it
    return winners.confirmed(selections, found, winners.Winners(job, stop_at, ctx), winners.Winners(job, min(soon, in_time), ctx), ctx)


def only_confirmed(found: Evaluated, ctx: Context) -> Evaluated:
    """What is known, with everything closed that the required validators of winners have not passed yet."""
    return winners.only_confirmed(found, ctx)


def over(ordered: tuple[OrderedPlan, ...], left_s: float, ctx: Context) -> Reason | None:
    """Why nothing of what is ordered will be evaluated, which is known before it is lowered; None: it may be."""
    if left_s <= 0:
        return Reason.TIME
    if ctx.backend is None or not final_checks.installed(ctx):
        return None
    return Reason.ENDED if spent_before(ordered, environment(ctx.backend, ctx), ctx) else None


class _Stage:
    """One call: the queue of entries, the ledger of what is known, the memory of earlier searches."""

    def __init__(self, ordered: tuple[OrderedPlan, ...], backend: Backend, stop_at: float, ctx: Context) -> None:
        self._ordered, self._backend, self._stop_at, self._ctx = ordered, backend, stop_at, ctx
        self._queue = Queue(ordered, backend, ctx)
        self._ledger = Ledger(backend, ctx)
        self._phases: dict[int, str] = {}  # what the worker was last seen to do with each job

    def evaluated(self, candidates: tuple[Candidate, ...], earlier: tuple[TuningRecord, ...], again: frozenset[Place]) -> Evaluated:
        ledger = self._ledger
        with uncollected():  # many small objects, of which none is garbage
            entries = self._queue.entries(candidates)
            search = Search(self._ordered, (entry.key for entry in entries), self._queue.where, self._ctx)
            fresh = self._recalled(entries, search, earlier)
        if search.ended:
            ledger.leave([entry for entry in fresh if entry.key not in search.lost], Reason.ENDED)
            fresh = [entry for entry in fresh if entry.key in search.lost]
        if fresh or not search.ended:
            self._evaluate(fresh, search, self._by_promise(fresh, earlier, again) if self._backend.clock else fresh)
        return Evaluated(candidates=candidates, records=(*self._judged(entries), *ledger.baselines.values()), kernels=ledger.kernels,
                         cached=frozenset(ledger.cached), untried=(*self._queue.untried, *ledger.untried))

    def _recalled(self, entries: list[Entry], search: Search, earlier: tuple[TuningRecord, ...]) -> list[Entry]:
        """Tell the ledger what is known of ``entries``; those of which nothing is."""
        ledger = self._ledger
        ledger.newcomers = search.new
        ledger.recall(earlier, (one.plan.region for one in self._ordered))
        for entry in entries:
            ledger.recall_baseline(entry)
        stored = {entry.key: record for entry in entries if (record := self._ctx.store.record(entry.key)) is not None}
        left_s = max(0.0, self._stop_at - time.monotonic())
        self._ctx.emit(SearchStarted(total=len(entries), cached=len(stored), left_s=left_s))
        for entry in entries:
            if entry.key in stored:
                ledger.recall_record(entry, stored[entry.key])
        return [entry for entry in entries if entry.key not in stored]

    def _evaluate(self, fresh: list[Entry], search: Search, turns: Iterable[Entry]) -> None:
        ledger = self._ledger
        sent: list[Entry] = []
        if fresh:
            self._await_worker()
            twins = Twins(fresh)
            for index, evaluation in self._evaluations(fresh, turns, sent, twins):
                ledger.take(sent[index], evaluation)
                for twin in twins.of(sent[index]):
                    ledger.share(twin, sent[index])
                if ledger.hopeless:
                    break
            else:
                self._say_unfinished(sent)
        if not ledger.hopeless and search.ended:
            search.retried(entry.key for entry in fresh if not ledger.knows(entry))
        elif not ledger.hopeless:
            tried = frozenset((r.signature, r.step.implementation) for r in ledger.records)
            search.end(out_of_time=time.monotonic() >= self._stop_at, tried=tried, lost=ledger.lost)
        ledger.leave(fresh, Reason.NO_JUDGE if ledger.hopeless else Reason.TIME)

    def _say_unfinished(self, sent: list[Entry]) -> None:
        """What ran when the time was over is told: it may be a validator that never ends."""
        for index, phase in sorted(dict(self._phases).items()):
            if not self._ledger.knows(sent[index]):
                self._ctx.emit(Skipped(subject=str(sent[index].candidate.step), message=f"the time was used up during {phase}"))

    def _heard(self, index: int, phase: str) -> None:
        self._phases[index] = phase

    def _await_worker(self) -> None:
        """The clock stands still until candidates can be judged: a small budget is spent on them, not on a process that starts."""
        began, ctx = time.monotonic(), self._ctx
        ctx.running_worker().prepare(self._backend.name, ctx.target, ctx.config.validators)
        waited_s = time.monotonic() - began
        ctx.budget.delay(waited_s)
        self._stop_at += waited_s

    def _evaluations(self, fresh: list[Entry], turns: Iterable[Entry], sent: list[Entry],
                     twins: Twins) -> Iterator[tuple[int, Evaluation]]:
        worker = self._ctx.running_worker()
        if self._backend.side_by_side:
            return worker.evaluate_beside(self._jobs_beside(fresh, sent, twins), stop_at=self._stop_at, progress=self._heard)
        return worker.evaluate(self._jobs(turns, sent, twins), stop_at=self._stop_at, window=self._backend.window, progress=self._heard)

    def _jobs(self, turns: Iterable[Entry], sent: list[Entry], twins: Twins) -> Iterator[Job]:
        for entry in turns:
            if not (self._ledger.is_settled(entry) or twins.waits(entry)):
                sent.append(entry)
                twins.send(entry)
                yield self._job(entry)

    def _by_promise(self, fresh: list[Entry], earlier: tuple[TuningRecord, ...], again: frozenset[Place]) -> Turns:
        known = (*earlier, *self._ledger.records)
        tried = Counter((r.signature, r.step.match_id) for r in known if r.step.implementation != FRAMEWORK)
        return Turns(fresh, self._ordered, self._ledger, self._ctx.target, tried, again)

    def _jobs_beside(self, fresh: list[Entry], sent: list[Entry], twins: Twins) -> Iterator[Job | None]:
        """None as long as every entry that is left shares nodes with one under way: a rival that passes settles them."""
        waiting = list(fresh)
        while waiting := [entry for entry in waiting if not (self._ledger.is_settled(entry) or twins.waits(entry))]:
            under_way = [entry for entry in sent if not self._ledger.knows(entry)]
            free = next((entry for entry in waiting if not any(entry.is_rival_of(other) for other in under_way)), None)
            if free is not None:
                waiting.remove(free)
                sent.append(free)
                twins.send(free)
            yield self._job(free) if free is not None else None

    def _job(self, entry: Entry) -> Job:
        return evolve(job_of(entry, self._backend, self._ctx), baseline=entry.place not in self._ledger.baselines,
                      good_enough_us=self._ledger.best_us.get(entry.place, 0.0))

    def _judged(self, entries: list[Entry]) -> list[TuningRecord]:
        by_key = {entry.key: entry for entry in entries}
        stop_at = max(self._stop_at, self._ctx.budget.stop_at("winners"))
        return winners.best_of_each(self._ledger.records, winners.Winners(lambda record: self._job(by_key[record.key]), stop_at, self._ctx),
                                    self._ctx)
