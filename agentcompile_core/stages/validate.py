"""Stage validate: candidates are built, judged and timed in the worker; what the store knows already is not done again."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from attrs import define, evolve, frozen

from .. import keys, serial, winners
from ..advice import OrderedPlan, Risk
from ..candidate import CALLABLE, Candidate, Kernel
from ..cases import cases_for
from ..context import Context
from ..errors import Cause, Failure, Reject, StageName
from ..interfaces import Backend
from ..plan import Origin, Schedule, Step
from ..record import TuningRecord
from ..region import Match, Region, Role
from ..searches import Search
from ..verdict import Trial, Verdict
from ..worker import Evaluation, Job, Worker

FRAMEWORK = "framework"  # implementation of the record that holds a match's baseline
EMULATED_BYTES = 32 << 20  # a match that moves more is not emulated
WINNERS_S = 30.0  # for validators of winners, should the search have used up its time
DEVICE_DEADLINES_S = {"build": 60.0, "check": 15.0, "time": 15.0}  # a hang must not use up the budget
_NOT_KEPT = (Cause.UNAVAILABLE, Cause.EXCEPTION)  # failures of the moment rather than of the candidate


def baseline_step(match_id: str) -> Step:
    """The step under which the framework's time of a match is recorded."""
    return Step(match_id=match_id, implementation=FRAMEWORK, origin=Origin.FRAMEWORK, schedule=Schedule({}))


@frozen(kw_only=True)
class _Entry:
    """One candidate with everything its record needs."""

    candidate: Candidate
    trial: Trial
    key: str
    kernel_key: str
    baseline_key: str
    rank: int
    advisor: str
    primary: bool  # part of the planner's favourite cover
    nodes: frozenset[str]
    weight: int  # bytes per run of the program, for the order of evaluation

    @property
    def place(self) -> tuple[str, str]:
        return self.candidate.signature, self.candidate.step.match_id


@define
class _State:
    """What is known so far about each match while the stage runs."""

    best_us: dict[tuple[str, str], float]
    baselines: dict[tuple[str, str], TuningRecord]
    covered: dict[str, set[str]]  # without a clock: nodes of each region that disjoint valid steps serve already
    order: int = 0
    hopeless: bool = False  # the worker does not start, or a validator cannot judge

    def is_settled(self, entry: _Entry) -> bool:
        """Whether nothing is to be learnt any more about the nodes of an entry."""
        return entry.nodes <= self.covered.get(entry.candidate.signature, set())

    def settle(self, signature: str, nodes: Iterable[str]) -> None:
        """Without a clock one valid step is enough; remember its nodes if they are disjoint from those before."""
        covered = self.covered.setdefault(signature, set())
        if covered.isdisjoint(nodes):
            covered.update(nodes)


def run(candidates: tuple[Candidate, ...], regions: tuple[Region, ...], ordered: tuple[OrderedPlan, ...], left_s: float,
        ctx: Context) -> tuple[TuningRecord, ...]:
    """Evaluate ``candidates`` within ``left_s`` seconds; return a record of each that was evaluated, and of baselines.

    Matches take turns, those of the favourite cover and those that move most bytes first, so that an early end finds
    every match served.
    """
    if ctx.backend is None:
        ctx.report("validate", {"message": "no backend can launch kernels here; nothing is validated or selected"})
        return ()
    for name in ctx.config.validators:
        if all(validator.name != name for validator in ctx.catalog.validators.values()):
            message = "is not installed; without it no kernel is trusted, so everything stays on the framework"
            ctx.fail(Failure(stage=StageName.VALIDATE, cause=Cause.UNAVAILABLE, plugin=name, subject="validator", message=message))
            return ()
    entries = _entries(candidates, regions, ordered, ctx.backend, ctx)
    state = _State(best_us={}, baselines={}, covered={})
    if any(plan.record.round for plan in ordered) and _has_no_clock(ctx.backend):
        _recall(regions, state, ctx)
    search = Search(ordered, (entry.key for entry in entries), _environment(ctx.backend, ctx), ctx)
    stop_at = time.monotonic() + left_s
    records: list[TuningRecord] = []
    fresh: list[_Entry] = []
    for entry in entries:
        record = ctx.store.record(entry.key)
        if record is None:
            fresh.append(entry)
            continue
        records.append(_as_asked(record, entry))
        _learn(records[-1], entry, state, ctx.backend)
        _report(records[-1], entry, state, ctx, cached=True)
    for entry in entries:
        known = ctx.store.record(entry.baseline_key)
        if known is not None:
            state.baselines.setdefault(entry.place, evolve(known, signature=entry.candidate.signature, step=baseline_step(entry.place[1])))
    if not search.ended:
        records += _evaluated(fresh, state, stop_at, ctx.backend, ctx)
        if not state.hopeless:
            search.end(out_of_time=time.monotonic() >= stop_at)
    return (*_judged(records, entries, state, stop_at, ctx.backend, ctx), *state.baselines.values())


def _judged(records: list[TuningRecord], entries: list[_Entry], state: _State, stop_at: float, backend: Backend,
            ctx: Context) -> list[TuningRecord]:
    if not records or not winners.names_of(ctx, "winner"):
        return records
    by_key = {entry.key: entry for entry in entries}
    stop_at = max(stop_at, time.monotonic() + WINNERS_S)
    return winners.judged(records, lambda record: _job(by_key[record.key], state, backend, ctx), stop_at, worker_of(ctx), ctx)


def _recall(regions: tuple[Region, ...], state: _State, ctx: Context) -> None:
    """What earlier rounds settled where nothing is timed."""
    for region in regions:
        for record in ctx.store.records(region.signature):
            match = region.match_by_id.get(record.step.match_id)
            if match is not None and record.verdict is not None and record.verdict.passed and record.failure is None:
                state.settle(region.signature, match.nodes)


def _entries(candidates: tuple[Candidate, ...], regions: tuple[Region, ...], ordered: tuple[OrderedPlan, ...], backend: Backend,
             ctx: Context) -> list[_Entry]:
    by_signature = {region.signature: region for region in regions}
    ranks = {(plan.signature, step): rank for plan in ordered for step, rank in zip(plan.steps, plan.ranks, strict=True)}
    plans = {plan.signature: plan for plan in ordered}
    environment = _environment(backend, ctx)
    queues: dict[tuple[str, str], list[_Entry]] = {}
    trials: dict[tuple[str, str], Trial] = {}
    seen: set[str] = set()
    for candidate in candidates:
        region, plan = by_signature[candidate.signature], plans.get(candidate.signature)
        place = (candidate.signature, candidate.step.match_id)
        if place not in trials:
            match = region.match_by_id[place[1]]
            if _too_large(match, backend):
                ctx.report("skipped", {"match": match.id, "message": f"more than {EMULATED_BYTES >> 20} MiB are too much to emulate"})
                continue
            trials[place] = _trial(candidate, region, plan.record.accepted.risks if plan else (), backend, ctx)
        trial = evolve(trials[place], source=candidate.source)
        key = "record-" + serial.digest(trial, *environment, keys.device_library_digest(), length=32)
        if key in seen:  # another schedule lowers to the same source and launches: one evaluation, one record
            continue
        seen.add(key)
        queues.setdefault(place, []).append(_Entry(
            candidate=candidate, trial=trial, key=key,
            kernel_key=keys.kernel_key(candidate.source, ctx.target, backend.name, backend.compiler()),
            baseline_key="baseline-" + serial.digest(trial.match, trial.graph, *environment, length=32),
            rank=ranks.get((candidate.signature, candidate.step), -1), advisor=plan.record.advisor if plan else "",
            primary=plan is not None and place[1] in plan.primary, nodes=frozenset(trial.match.nodes),
            weight=trial.match.bytes_moved * len(region.instances)))
    return _by_turns(list(queues.values()))


def _by_turns(queues: list[list[_Entry]]) -> list[_Entry]:
    """First schedules of the favourite cover, then of the other matches, then everyone's second schedules, and so on."""
    queues.sort(key=lambda queue: (not queue[0].primary, -queue[0].weight))
    longest = max((len(queue) for queue in queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def _trial(candidate: Candidate, region: Region, risks: tuple[Risk, ...], backend: Backend, ctx: Context) -> Trial:
    match = region.match_by_id[candidate.step.match_id]
    outputs = tuple(value for o in match.operands if o.role is Role.OUTPUT for value in o.values)
    graph = region.graph.sub(match.nodes, match.id, outputs)
    cases = cases_for(match, f"{ctx.config.seed} {region.signature}", risks, emulated=backend.device == "cpu")
    return Trial(match=match, graph=graph, source=candidate.source, target=ctx.target, cases=cases)


def _too_large(match: Match, backend: Backend) -> bool:
    # A lookup moves a row, but its table must be made, checked and copied like any other operand.
    largest = max((o.spec.nbytes for o in match.operands if o.role is not Role.STATE), default=0)
    return backend.device == "cpu" and max(match.bytes_moved, largest) > EMULATED_BYTES


def _environment(backend: Backend, ctx: Context) -> tuple[Any, ...]:
    """Everything beside the trial that a result depends on: compiler, validators, and the device with its driver."""
    validators = tuple((name, ctx.catalog.find("agentcompile_validators", name).version) for name in ctx.config.validators)
    return (backend.name, backend.version, backend.compiler(), validators, _device(backend))


def _device(backend: Backend) -> str:
    if backend.device != "cuda":
        return backend.device
    import torch

    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return f"{torch.cuda.get_device_name()} driver {driver} torch {torch.__version__}" if torch.cuda.is_available() else "cuda"


def worker_of(ctx: Context) -> Worker:
    """The worker of this compilation; made, not started, if there is none yet."""
    if ctx.worker is None:
        ctx.worker = Worker(deadlines_s=DEVICE_DEADLINES_S if ctx.backend is not None and ctx.backend.device == "cuda" else {})
    return ctx.worker


def _evaluated(fresh: list[_Entry], state: _State, stop_at: float, backend: Backend, ctx: Context) -> Iterator[TuningRecord]:
    sent: list[_Entry] = []
    window = 2 if backend.device == "cpu" else 24

    def jobs() -> Iterator[Job]:
        for entry in fresh:
            if not state.is_settled(entry):
                sent.append(entry)
                yield _job(entry, state, backend, ctx)

    if not fresh:
        return
    for index, evaluation in worker_of(ctx).evaluate(jobs(), stop_at=stop_at, window=window):
        entry = sent[index]
        record = _record(entry, evaluation, state)
        _keep(entry, record, evaluation, state, ctx)
        _learn(record, entry, state, backend)
        _report(record, entry, state, ctx, cached=False)
        yield record
        if record.failure is Cause.UNAVAILABLE and not (record.verdict and record.verdict.passed):
            state.hopeless = True
            return


def _job(entry: _Entry, state: _State, backend: Backend, ctx: Context) -> Job:
    known = None if entry.candidate.source.language == CALLABLE else ctx.store.kernel(entry.kernel_key)
    names = winners.names_of(ctx, "candidate")
    return Job(trial=entry.trial, step=entry.candidate.step, backend=backend.name, validators=names, kernel=known,
               baseline=entry.place not in state.baselines, good_enough_us=state.best_us.get(entry.place, 0.0))


def _record(entry: _Entry, evaluation: Evaluation, state: _State) -> TuningRecord:
    state.order += 1
    kernel = evaluation.kernel
    extra = {} if kernel is None else {"resources": kernel.resources}
    return TuningRecord(
        key=entry.key, signature=entry.candidate.signature, step=entry.candidate.step, source_digest=entry.candidate.source.digest,
        verdict=_decisive(evaluation.verdicts), measurement=evaluation.measurement, failure=evaluation.failure,
        message=evaluation.message, advisor=entry.advisor, advisor_rank=entry.rank, order=state.order, **extra)


def _decisive(verdicts: tuple[Verdict, ...]) -> Verdict | None:
    """The first failed verdict, else the first one."""
    return next((v for v in verdicts if not v.passed), verdicts[0] if verdicts else None)


def _keep(entry: _Entry, record: TuningRecord, evaluation: Evaluation, state: _State, ctx: Context) -> None:
    if isinstance(evaluation.kernel, Kernel):
        ctx.store.put_kernel(entry.kernel_key, evaluation.kernel)
    if record.failure not in _NOT_KEPT:
        ctx.store.put_record(record)
    if evaluation.baseline is not None and entry.place not in state.baselines:
        baseline = TuningRecord(key=entry.baseline_key, signature=record.signature, step=baseline_step(record.step.match_id),
                                source_digest="", verdict=None, measurement=evaluation.baseline)
        state.baselines[entry.place] = baseline
        ctx.store.put_record(baseline)
    if record.failure in (Cause.CRASH, Cause.MEMORY_FAULT, Cause.MISALIGNED, Cause.TIMEOUT, Cause.UNAVAILABLE):
        ctx.fail(Failure(stage=StageName.VALIDATE, cause=record.failure, plugin=record.step.implementation, subject=str(record.step),
                         message=record.message))


def _learn(record: TuningRecord, entry: _Entry, state: _State, backend: Backend) -> None:
    if record.usable and record.measurement is not None:
        best = state.best_us.get(entry.place, record.measurement.us)
        state.best_us[entry.place] = min(best, record.measurement.us)
    elif record.verdict is not None and record.verdict.passed and record.failure is None and _has_no_clock(backend):
        state.settle(entry.candidate.signature, entry.nodes)


def _has_no_clock(backend: Backend) -> bool:
    return backend.device == "cpu" and isinstance(backend.time(lambda stream: None, repetitions=1, runs_per_repetition=1), Reject)


def _as_asked(record: TuningRecord, entry: _Entry) -> TuningRecord:
    """A stored record under the names and ranks of this run."""
    return evolve(record, signature=entry.candidate.signature, step=entry.candidate.step, advisor=entry.advisor, advisor_rank=entry.rank)


def _report(record: TuningRecord, entry: _Entry, state: _State, ctx: Context, *, cached: bool) -> None:
    baseline = state.baselines.get(entry.place)
    ctx.report("candidate", {
        "signature": record.signature, "match": record.step.match_id, "implementation": record.step.implementation,
        "schedule": dict(record.step.schedule.items), "verdict": record.verdict.outcome.value if record.verdict else "none",
        "us": record.measurement.us if record.measurement else None,
        "floor_us": record.measurement.floor_us if record.measurement else None,
        "baseline_us": baseline.measurement.us if baseline and baseline.measurement else None,
        "failure": record.failure.value if record.failure else None, "message": record.message, "advisor": record.advisor,
        "rank": record.advisor_rank, "order": record.order, "cached": cached,
    })
    ctx.catalog.emit("agentcompile_candidate_finished", record=record)
