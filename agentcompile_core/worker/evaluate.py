"""What the child does with one job: build, validate, time, look again at what was timed."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from attrs import evolve

from ..errors import AgentCompileError, BuildError, Cause, Reject
from ..ir import serial
from ..ir.candidate import CALLABLE, Kernel
from ..ir.record import Measurement
from ..ir.target import Target
from ..ir.verdict import Outcome, Verdict
from ..plugin.catalog import Catalog
from ..plugin.interfaces import Backend
from ..runtime.executables import bind_call
from . import after_timing, timing
from .causes import build_cause, cause_of
from .execution import Execution, Oracles
from .protocol import Evaluation, Job
from .validating import SILENT, Validating

UNTIMED_SHARE = 0.02  # of the time that the validators took: more runs of what cannot be timed


class WorkerState:
    """What lives as long as the child: the catalog, tried validators (``validating``), references, framework timings."""

    def __init__(self, catalog: Catalog, validating: Validating | None = None) -> None:
        self.catalog = catalog
        self.oracles = Oracles()
        self._validating = validating or Validating(catalog)
        self._baselines: dict[str, Measurement | Reject] = {}
        self.used: Backend | None = None  # the backend that served last
        self._clocks: dict[str, tuple[float, ...] | Reject] = {}

    @property
    def validating(self) -> Validating:
        """Its validators."""
        return self._validating

    def backend(self, name: str) -> Backend:
        """The backend called ``name``."""
        found = self.catalog.find("agentcompile_backends", name)
        assert isinstance(found, Backend)
        self.used = found
        return found

    def build(self, job: Job) -> Kernel | Evaluation | None:
        """The kernel of a job (None: a bound callable needs none), or the evaluation that a failed build ends in."""
        if job.kernel is not None or job.trial.source.language == CALLABLE:
            return job.kernel
        try:
            return self.backend(job.backend).build(job.trial.source, job.trial.target)
        except BuildError as exc:
            return Evaluation(failure=build_cause(str(exc)), message=str(exc)[:2000])
        except (Exception, SystemExit) as exc:  # a backend's defect costs this candidate
            return Evaluation(failure=Cause.EXCEPTION, message=f"build: {type(exc).__name__}: {exc}"[:2000])

    def evaluate(self, job: Job, kernel: Kernel | None, phase: Callable[[str], None]) -> Evaluation:
        """Validate and time one built candidate."""
        began = time.monotonic()
        execution = self._execution(job, kernel)
        ready = Evaluation(kernel=kernel, bound=job.trial.source.language == CALLABLE)
        done = execution if isinstance(execution, Evaluation) else self._judged(job, execution, ready, phase)
        return evolve(done, seconds=time.monotonic() - began)

    def _execution(self, job: Job, kernel: Kernel | None) -> Execution | Evaluation:
        """The candidate ready to run, or the evaluation that a failed load or bind ends in."""
        is_call = job.trial.source.language == CALLABLE
        try:
            backend, kind = self.backend(job.backend), self.catalog.kind(job.trial.match.kind)
            if is_call:
                bound = bind_call(job.step, job.trial.match, self.catalog, job.trial.target)
                return Execution(job.trial, backend, None, bound=bound, oracles=self.oracles, kind=kind)
            assert kernel is not None
            return Execution(job.trial, backend, backend.load(kernel), oracles=self.oracles, kind=kind)
        except (Exception, SystemExit) as exc:  # a defect of the backend or of the implementation costs this candidate
            cause = Cause.CONTRACT if isinstance(exc, AgentCompileError) else cause_of(exc)
            message = f"{'bind' if is_call else 'load'}: {type(exc).__name__}: {exc}"
            return Evaluation(kernel=kernel, failure=cause, message=message[:2000])

    def _judged(self, job: Job, execution: Execution, done: Evaluation, phase: Callable[[str], None]) -> Evaluation:
        began = time.monotonic()
        try:
            done = evolve(done, verdicts=self._verdicts(job, execution, phase))
            if not done.verdicts:
                return evolve(done, failure=Cause.CONTRACT, message="no validator was named, so nothing may be selected")
            failed = done.verdicts[-1]
            if not failed.passed:
                return evolve(done, failure=failed.cause or Cause.TOLERANCE, message=failed.message)
            if job.time and all(v.message == SILENT for v in done.verdicts):
                return evolve(done, failure=Cause.CONTRACT, message=f"none of {', '.join(job.validators)} has anything to say of it")
            if job.time:
                phase("time")
                done = self._timed(job, execution, done, UNTIMED_SHARE * (time.monotonic() - began))
            return done
        except AgentCompileError as exc:
            return evolve(done, failure=Cause.CONTRACT, message=str(exc)[:2000])
        except (Exception, SystemExit) as exc:
            return evolve(done, failure=cause_of(exc, execution.backend), message=f"{type(exc).__name__}: {exc}"[:2000])

    def _verdicts(self, job: Job, execution: Execution, phase: Callable[[str], None]) -> tuple[Verdict, ...]:
        """One per validator in the order of their names; the first that refuses ends it."""
        found: list[Verdict] = []
        for name in job.validators:
            found.append(self._validating.verdict(name, execution, phase))
            if not found[-1].passed:
                break
        return tuple(found)

    def _timed(self, job: Job, execution: Execution, done: Evaluation, spare_s: float) -> Evaluation:
        case = job.trial.cases[0]
        possible = self._clock(execution.backend)
        if isinstance(possible, Reject):
            wrong = after_timing.look_untimed(execution, spare_s)
            return _provisional(done, possible.reason) if wrong is None else evolve(done, failure=wrong[0], message=wrong[1])
        turn = timing.rotation(job.trial, execution.kind, case, execution.device)
        measured = timing.time_kernel(execution, turn, job.good_enough_us)
        execution.synchronize()
        if isinstance(measured, Reject):
            return evolve(done, failure=Cause.UNAVAILABLE, message=measured.reason)
        why = after_timing.impossible(measured, turn.cold)
        if why:
            return evolve(done, failure=Cause.CONTRACT, message=why)
        wrong = after_timing.look(execution, turn)
        if wrong is not None:
            return evolve(done, failure=wrong[0], message=wrong[1])
        done = evolve(done, measurement=measured)
        return evolve(done, baseline=self._baseline(job, execution.backend, turn, measured.us)) if job.baseline else done

    def _clock(self, backend: Backend) -> tuple[float, ...] | Reject:
        if backend.name not in self._clocks:
            self._clocks[backend.name] = backend.time(lambda stream: None, repetitions=1, runs_per_repetition=1)
        return self._clocks[backend.name]

    def _baseline(self, job: Job, backend: Backend, turn: timing.Rotation, kernel_us: float) -> Measurement | None:
        key = serial.digest(job.trial.graph, job.trial.match)
        if key not in self._baselines:
            self._baselines[key] = timing.time_framework(job.trial, backend, turn, kernel_us)
        found = self._baselines[key]
        return None if isinstance(found, Reject) else found


def prepare(argument: dict[str, Any], state: WorkerState, phase: Callable[[str], None]) -> None:
    """Have a backend ready and validators proven before the first job. What is wrong with any of them is said of the jobs that need it."""
    target = serial.structure(argument["target"], Target)
    with contextlib.suppress(Exception, SystemExit):
        backend = state.backend(str(argument["backend"]))
        backend.prepare()
        for name in argument["validators"]:
            phase(f"controls of {name}")
            state.validating.prove(str(name), backend, target)


def _provisional(done: Evaluation, why: str) -> Evaluation:
    verdicts = tuple(evolve(v, outcome=Outcome.PROVISIONAL) for v in done.verdicts)
    return evolve(done, verdicts=verdicts, message=why)
