"""Asking the validators of winners: of the best of each match before the chain, and of everything that was selected behind it."""

import time
from collections.abc import Callable, Iterable

from attrs import evolve

from ...context import Context
from ...errors import Cause
from ...ir.evaluated import Evaluated
from ...ir.plan import Step
from ...ir.record import TuningRecord
from ...ir.selection import SelectedStep, Selection
from ...ir.verdict import Verdict
from ...plugin.events import WinnerRefused
from ...worker import Evaluation, Job
from ...worker.validating import SILENT
from . import final_checks

Place = tuple[str, str]  # signature, match id
Jobs = Callable[[TuningRecord], Job | None]
NO_TIME = "no time was left for it"


class Winners:
    """Asks until ``stop_at`` (``time.monotonic``); what was said before, by the same code, is not asked again."""

    def __init__(self, jobs: Jobs, stop_at: float, ctx: Context) -> None:
        self._jobs, self._stop_at, self._ctx = jobs, stop_at, ctx

    def ask(self, record: TuningRecord, names: Iterable[str], *, must: bool = True) -> tuple[TuningRecord | None, tuple[str, ...]]:
        """The record as a failure if one of the validators refuses it, else None; and a clause on what each of them said.

        ``must``: one that there is no time for, or that gave no answer, closes it too.
        """
        clauses: list[str] = []
        for name in names:
            found = self.said(record, name)
            verdict = found.verdicts[-1] if found is not None and found.verdicts else None
            if found is not None and found.failure is not None and (must or (verdict is not None and not _unfit(found))):
                return self._refused(record, found), tuple(clauses)
            if found is None and must:
                message = f"not judged by {name} within the budget"
                return evolve(record, failure=Cause.UNAVAILABLE, message=message, measurement=None, verdict=None), tuple(clauses)
            clauses.append(_clause(name, found, verdict))
        return None, tuple(clauses)

    def _refused(self, record: TuningRecord, found: Evaluation) -> TuningRecord:
        refusal = evolve(record, failure=found.failure, message=found.message, measurement=None,
                         verdict=next((v for v in found.verdicts if not v.passed), None))
        self._ctx.emit(WinnerRefused(step=str(record.step), message=found.message))
        self._ctx.fail(final_checks.failure_of(refusal))
        return refusal

    def said(self, record: TuningRecord, name: str) -> Evaluation | None:
        """What a validator says of a record, now or before; None: there is no time to ask."""
        verdict = final_checks.kept(self._ctx, record, name)
        if verdict is not None:
            return _as_evaluation(verdict)
        job = self._jobs(record) if time.monotonic() < self._stop_at else None
        if job is None:
            return None
        validator = final_checks.validator(self._ctx, name)
        job = evolve(job, validators=(name,), time=False, baseline=False, check_s=validator.deadline_s)
        asked = self._ctx.running_worker().evaluate([job], stop_at=self._stop_at)
        found = next((evaluation for _, evaluation in asked), None)
        if found is not None and found.verdicts and not _unfit(found):
            final_checks.keep(self._ctx, record, name, found.verdicts[-1])
        return found


def _unfit(found: Evaluation) -> bool:
    """Whether the validator, and not the kernel, is why there is no pass."""
    return found.failure in (Cause.EXCEPTION, Cause.UNAVAILABLE)


def _clause(name: str, found: Evaluation | None, verdict: Verdict | None) -> str:
    if found is None or verdict is None or not verdict.passed:
        return f"{name}: {NO_TIME if found is None else found.message}"
    return f"{name} has nothing to say of it" if verdict.message == SILENT else f"{name} found nothing"


def _as_evaluation(verdict: Verdict) -> Evaluation:
    failure = None if verdict.passed else verdict.cause or Cause.TOLERANCE
    return Evaluation(verdicts=(verdict,), failure=failure, message=verdict.message)


def passed(record: TuningRecord) -> bool:
    """Whether nothing that was asked so far is against a record."""
    return record.failure is None and record.verdict is not None and record.verdict.passed


def best_of_each(records: list[TuningRecord], winners: Winners, ctx: Context) -> list[TuningRecord]:
    """The records, with those that a configured validator of winners refused turned into failures.

    Per match candidates are judged in the order of their times; the first that passes ends it. Nothing above it stays
    selectable unjudged; what is selected from behind it is judged then (``confirmed``).
    """
    names = final_checks.in_budget(ctx)
    places: dict[Place, list[TuningRecord]] = {}
    for record in records if names else ():
        if passed(record):
            places.setdefault((record.signature, record.step.match_id), []).append(record)
    changed: dict[str, TuningRecord] = {}
    for queue in places.values():
        for record in sorted(queue, key=lambda r: (_us(r), r.order)):
            closed, _ = winners.ask(record, names)
            if closed is None:
                break
            changed[record.key] = closed
    return [changed.get(record.key, record) for record in records]


def confirmed(selections: tuple[Selection, ...], found: Evaluated, winners: Winners, spare: Winners,
              ctx: Context) -> tuple[tuple[Selection, ...], Evaluated]:
    """Ask about every selected step, ``winners`` for those who must pass it and ``spare`` for those that there may be time for.

    Returns the selections with what was said, and what is known with the refused steps closed.
    """
    records = {(r.signature, r.step): r for r in found.records}
    chosen = [(s.signature, x.step) for s in selections for x in s.steps if (s.signature, x.step) in records]
    closed: dict[str, TuningRecord] = {}
    said: dict[tuple[str, Step], tuple[str, ...]] = {}
    for place in sorted(chosen, key=lambda place: _us(records[place])):  # what is fast here is small, and soon judged
        record = records[place]
        refusal, said[place] = winners.ask(record, final_checks.required(ctx))
        if refusal is None:
            refusal, more = spare.ask(record, final_checks.affordable(ctx), must=False)
            said[place] += more
        if refusal is not None:
            closed[record.key] = refusal
    told = tuple(evolve(s, steps=tuple(_told(x, said.get((s.signature, x.step), ())) for x in s.steps)) for s in selections)
    return told, evolve(found, records=tuple(closed.get(r.key, r) for r in found.records)) if closed else found


def _us(record: TuningRecord) -> float:
    return record.measurement.us if record.measurement else 0.0


def _told(step: SelectedStep, clauses: tuple[str, ...]) -> SelectedStep:
    return evolve(step, reason="; ".join((step.reason, *clauses))) if clauses else step


def only_confirmed(found: Evaluated, ctx: Context) -> Evaluated:
    """What is known, with everything closed that a required validator has not passed yet."""
    def known(record: TuningRecord) -> TuningRecord:
        verdicts = [final_checks.kept(ctx, record, name) for name in final_checks.required(ctx)]
        if not passed(record) or all(v is not None and v.passed for v in verdicts):
            return record
        return evolve(record, failure=Cause.UNAVAILABLE, message="not judged by the validators of winners within the budget",
                      measurement=None, verdict=None)

    return evolve(found, records=tuple(known(record) for record in found.records))
