"""Validators of scope ``winner``: too slow for every candidate, so they judge the best of each match, until one passes."""

import time
from collections.abc import Callable

from attrs import evolve

from ...context import Context
from ...errors import Cause
from ...ir.record import TuningRecord
from ...plugin.events import WinnerRefused
from ...plugin.settings import identity
from ...store.keys import Versions
from ...worker import Job, Worker

KIND = "winners"
Place = tuple[str, str]  # signature, match id


def names_of(ctx: Context, scope: str) -> tuple[str, ...]:
    """The configured validators of one scope, by their configured names."""
    return tuple(n for n in ctx.config.validators if ctx.catalog.find("agentcompile_validators", n).scope == scope)


def expected(ctx: Context) -> bool:
    """Whether a validator of winners is configured and installed."""
    return any(v.scope == "winner" and (v.name in ctx.config.validators or qualified in ctx.config.validators)
               for qualified, v in ctx.catalog.validators.items())


def versions(ctx: Context) -> Versions:
    """The configured validators with their versions and what their settings add to keys."""
    found = ((name, ctx.catalog.find("agentcompile_validators", name)) for name in ctx.config.validators)
    return tuple((name, validator.version, *identity(validator)) for name, validator in found)


def judged(records: list[TuningRecord], jobs: Callable[[TuningRecord], Job], stop_at: float, worker: Worker,
           ctx: Context) -> list[TuningRecord]:
    """The records, with those that a winner's validator refused turned into failures.

    Per match candidates are judged in the order of their times; the first that passes ends it. Nothing above it stays
    selectable unjudged: what the time did not suffice for fails as unavailable.
    """
    names = names_of(ctx, "winner")
    if not names:
        return records
    places: dict[Place, list[TuningRecord]] = {}
    for record in records:
        if record.failure is None and record.verdict is not None and record.verdict.passed:
            places.setdefault((record.signature, record.step.match_id), []).append(record)
    changed: dict[str, TuningRecord] = {}
    for queue in places.values():
        queue.sort(key=lambda r: (r.measurement.us if r.measurement else 0.0, r.order))
        _judge(queue, names, jobs, stop_at, worker, ctx, changed)
    return [changed.get(record.key, record) for record in records]


def _judge(queue: list[TuningRecord], names: tuple[str, ...], jobs: Callable[[TuningRecord], Job], stop_at: float, worker: Worker,
           ctx: Context, changed: dict[str, TuningRecord]) -> None:
    for record in queue:
        if ctx.store.text(KIND, record.key) == ",".join(names):
            return
        found = None
        if time.monotonic() < stop_at:
            job = evolve(jobs(record), validators=names, time=False, baseline=False)
            found = next((evaluation for _, evaluation in worker.evaluate([job], stop_at=stop_at)), None)
        if found is None:
            why = f"not judged by {', '.join(names)} within the budget"
            changed[record.key] = evolve(record, failure=Cause.UNAVAILABLE, message=why, measurement=None, verdict=None)
            continue
        if found.failure is None:
            ctx.store.put_text(KIND, record.key, ",".join(names))
            return
        verdict = next((v for v in found.verdicts if not v.passed), None)
        changed[record.key] = evolve(record, failure=found.failure, message=found.message, measurement=None, verdict=verdict)
        ctx.store.put_record(changed[record.key])
        ctx.emit(WinnerRefused(step=str(record.step), message=found.message))
