"""Stage validate: candidates are built, judged and timed in the worker; what the store knows already is not done again."""

import time
from collections.abc import Iterator

from attrs import frozen

from ...context import Context
from ...errors import Cause, Failure, StageName
from ...ir.advice import OrderedPlan
from ...ir.candidate import CALLABLE, Candidate
from ...ir.plan import Step
from ...ir.record import TuningRecord
from ...ir.region import Region
from ...ir.search_log import Reason, Untried
from ...plugin.events import SearchStarted, Skipped
from ...plugin.interfaces import Backend
from ...worker import Job
from . import final_checks
from .entries import Entry, Queue
from .ledger import Ledger
from .resume import Search

__all__ = ["Evaluated", "evaluate", "run"]


@frozen(kw_only=True)
class Evaluated:
    """What one call found out: a record of each candidate that was evaluated and of baselines, and why the others were not."""

    records: tuple[TuningRecord, ...] = ()
    cached: frozenset[tuple[str, Step]] = frozenset()  # (signature, step) of those that the store knew
    untried: tuple[Untried, ...] = ()


def run(candidates: tuple[Candidate, ...], regions: tuple[Region, ...], ordered: tuple[OrderedPlan, ...], left_s: float,
        ctx: Context) -> tuple[TuningRecord, ...]:
    """The records of ``evaluate``."""
    return evaluate(candidates, regions, ordered, left_s, ctx).records


def evaluate(candidates: tuple[Candidate, ...], regions: tuple[Region, ...], ordered: tuple[OrderedPlan, ...], left_s: float,
             ctx: Context) -> Evaluated:
    """Evaluate ``candidates`` within ``left_s`` seconds.

    Matches take turns, those of the favourite cover and those that move most bytes first, so that an early end finds
    every match served.
    """
    if ctx.backend is None or not _can_judge(ctx):
        if ctx.backend is None:
            ctx.emit(Skipped(subject="validate", message="no backend can launch kernels here; nothing is validated or selected"))
        return Evaluated(untried=tuple(Untried(signature=c.signature, step=c.step, reason=Reason.NO_JUDGE) for c in candidates))
    return _Stage(regions, ordered, ctx.backend, time.monotonic() + left_s, ctx).evaluated(candidates)


def _can_judge(ctx: Context) -> bool:
    for name in ctx.config.validators:
        if all(validator.name != name for validator in ctx.catalog.validators.values()):
            message = "is not installed; without it no kernel is trusted, so everything stays on the framework"
            ctx.fail(Failure(stage=StageName.VALIDATE, cause=Cause.UNAVAILABLE, plugin=name, subject="validator", message=message))
            return False
    return True


class _Stage:
    """One call: the queue of entries, the ledger of what is known, the memory of earlier searches."""

    def __init__(self, regions: tuple[Region, ...], ordered: tuple[OrderedPlan, ...], backend: Backend, stop_at: float,
                 ctx: Context) -> None:
        self._regions, self._ordered, self._backend, self._stop_at, self._ctx = regions, ordered, backend, stop_at, ctx
        self._queue = Queue(regions, ordered, backend, ctx)
        self._ledger = Ledger(backend, ctx)

    def evaluated(self, candidates: tuple[Candidate, ...]) -> Evaluated:
        entries, ledger = self._queue.entries(candidates), self._ledger
        search = Search(self._ordered, (entry.key for entry in entries), self._queue.where, self._ctx)
        ledger.newcomers = search.new
        if any(plan.record.round for plan in self._ordered):
            ledger.recall(self._regions)
        for entry in entries:
            ledger.recall_baseline(entry)
        stored = {entry.key: record for entry in entries if (record := self._ctx.store.record(entry.key)) is not None}
        left_s = max(0.0, self._stop_at - time.monotonic())
        self._ctx.emit(SearchStarted(total=len(entries), cached=len(stored), left_s=left_s))
        for entry in entries:
            if entry.key in stored:
                ledger.recall_record(entry, stored[entry.key])
        fresh = [entry for entry in entries if entry.key not in stored]
        if search.ended:
            ledger.leave(fresh, Reason.ENDED)
        else:
            self._evaluate(fresh, search)
        return Evaluated(records=(*self._judged(entries), *ledger.baselines.values()), cached=frozenset(ledger.cached),
                         untried=(*self._queue.untried, *ledger.untried))

    def _evaluate(self, fresh: list[Entry], search: Search) -> None:
        ledger = self._ledger
        sent: list[Entry] = []
        if fresh:
            for index, evaluation in self._ctx.running_worker().evaluate(self._jobs(fresh, sent), stop_at=self._stop_at,
                                                                   window=self._backend.window):
                ledger.take(sent[index], evaluation)
                if ledger.hopeless:
                    break
        if not ledger.hopeless:
            tried = frozenset((r.signature, r.step.implementation) for r in ledger.records)
            search.end(out_of_time=time.monotonic() >= self._stop_at, tried=tried)
        ledger.leave(fresh, Reason.NO_JUDGE if ledger.hopeless else Reason.TIME)

    def _jobs(self, fresh: list[Entry], sent: list[Entry]) -> Iterator[Job]:
        for entry in fresh:
            if not self._ledger.is_settled(entry):
                sent.append(entry)
                yield self._job(entry)

    def _job(self, entry: Entry) -> Job:
        known = None if entry.candidate.source.language == CALLABLE else self._ctx.store.kernel(entry.kernel_key)
        names = final_checks.names_of(self._ctx, "candidate")
        return Job(trial=entry.trial, step=entry.candidate.step, backend=self._backend.name, validators=names, kernel=known,
                   baseline=entry.place not in self._ledger.baselines, good_enough_us=self._ledger.best_us.get(entry.place, 0.0))

    def _judged(self, entries: list[Entry]) -> list[TuningRecord]:
        records = self._ledger.records
        if not records or not final_checks.names_of(self._ctx, "winner"):
            return records
        by_key = {entry.key: entry for entry in entries}
        stop_at = max(self._stop_at, self._ctx.budget.stop_at("winners"))
        return final_checks.judged(records, lambda record: self._job(by_key[record.key]), stop_at, self._ctx.running_worker(), self._ctx)
