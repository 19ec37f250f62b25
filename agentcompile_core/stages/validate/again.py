"""Kernels of a bundle, and what its steps bind here, are judged as candidates are: same cases, same validators, same evidence."""

import time
from collections.abc import Iterator, Mapping, Sequence

from attrs import evolve

from ...context import Context
from ...errors import one_line
from ...ir.candidate import Candidate
from ...ir.plan import Step
from ...ir.record import TuningRecord
from ...ir.verdict import Rejudged, Trial
from ...plugin.events import SearchStarted, StageFinished, StageStarted
from ...plugin.interfaces import Backend
from ...store import keys
from ...worker import Job
from . import final_checks, winners
from .entries import Entry, environment, job_of, largest_bytes
from .input_cases import cases_for
from .ledger import Ledger

STAGE = "validate"


def judged(asked: Sequence[tuple[Step, Trial]], backend: Backend, ctx: Context, *, signatures: Mapping[Step, str]) -> tuple[Rejudged, ...]:
    """Whether each of ``asked`` (a step, and a trial without cases) passed, here or in the store's records under the same key.

    ``signatures`` are those of the steps' regions, which the cases are drawn by. The budget of the configuration bounds it all,
    beginning with what moves most bytes; what no time is left for is not run. The worker is gone when this returns.
    """
    began, ctx = time.monotonic(), evolve(ctx, backend=backend, worker=None)
    ctx.emit(StageStarted(stage=STAGE))
    if not final_checks.installed(ctx):
        return (Rejudged(why="not every configured validator is installed"),) * len(asked)
    try:
        found = _Again(backend, ctx).answers([_entry(step, trial, signatures.get(step, ""), backend, ctx) for step, trial in asked])
    finally:
        ctx.close()
    ctx.emit(StageFinished(stage=STAGE, seconds=time.monotonic() - began,
                           facts={"records": len(found), "passed": sum(1 for one in found if not one.why)}))
    return found


class _Again:
    """One call: entries in, reasons out."""

    def __init__(self, backend: Backend, ctx: Context) -> None:
        self._backend, self._ctx, self._ledger = backend, ctx, Ledger(backend, ctx)
        self._stop_at = ctx.budget.stop_at()

    def answers(self, entries: Sequence[Entry | str]) -> tuple[Rejudged, ...]:
        """What became of each entry; what is no entry is a reason against it already."""
        distinct = {e.key: e for e in entries if isinstance(e, Entry)}
        wanted = sorted(distinct.values(), key=lambda e: -e.weight)
        stored = {e.key: record for e in wanted if (record := self._ctx.store.record(e.key)) is not None}
        fresh = [e for e in wanted if e.key not in stored]
        self._ctx.emit(SearchStarted(total=len(wanted), cached=len(stored), left_s=max(0.0, self._stop_at - time.monotonic())))
        for entry in wanted:
            if entry.key in stored:
                self._ledger.recall_record(entry, stored[entry.key])
        self._evaluate(fresh)
        records = {record.key: record for record in self._ledger.records}
        known = {key: self._said(records.get(key), entry) for key, entry in distinct.items()}
        return tuple(Rejudged(why=known[e.key], on_record=e.key in stored) if isinstance(e, Entry) else Rejudged(why=e) for e in entries)

    def _evaluate(self, fresh: list[Entry]) -> None:
        jobs: Iterator[Job] = (self._job(entry) for entry in fresh)
        found = self._ctx.running_worker().evaluate(jobs, stop_at=self._stop_at, window=self._backend.window) if fresh else ()
        for index, evaluation in found:
            self._ledger.take(fresh[index], evaluation)
            if self._ledger.hopeless:
                break

    def _job(self, entry: Entry) -> Job:
        return job_of(entry, self._backend, self._ctx)

    def _said(self, record: TuningRecord | None, entry: Entry) -> str:
        if record is None:
            return f"no time was left to validate it within the budget of {self._ctx.config.budget_s:g} s (budget_s)"
        asked = winners.Winners(lambda _: self._job(entry), self._stop_at, self._ctx)
        closed = asked.ask(record, final_checks.required(self._ctx))[0] if record.passed else record
        if closed is None:
            return ""
        return one_line(f"{entry.candidate.step}: {closed.message or (closed.failure.value if closed.failure else 'not validated')}", 300)


def _entry(step: Step, trial: Trial, signature: str, backend: Backend, ctx: Context) -> Entry | str:
    """The entry of a kernel with the cases that a candidate would have; one sentence where it cannot be tried."""
    limit = backend.largest_match_bytes
    if limit and largest_bytes(trial.match) > limit:
        return f"{step}: more than {limit >> 20} MiB are too much for {backend.name}"
    try:
        kind = ctx.catalog.kind(trial.match.kind)
        cases = cases_for(trial.match, kind, f"{ctx.config.seed} {signature}", emulated=backend.emulated, source=trial.source,
                          schedule=step.schedule)
        trial, where = evolve(trial, cases=cases), environment(backend, ctx)
        key = keys.record_key(trial, where, keys.code_of(type(kind)))
        return Entry(candidate=Candidate(signature=signature, step=step, source=trial.source), trial=trial, key=key, twin=key,
                     kernel_key=keys.kernel_key(trial.source, ctx.target, backend),
                     baseline_key=keys.baseline_key(trial.match, trial.graph, where), rank=-1, advisor="", primary=True,
                     nodes=frozenset(trial.match.nodes), weight=trial.match.bytes_moved)
    except (Exception, SystemExit) as exc:  # a kind need not cope with a match that a bundle made up
        return one_line(f"{step}: {type(exc).__name__}: {exc}", 300)
