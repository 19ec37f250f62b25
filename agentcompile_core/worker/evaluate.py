"""What the child does with one job: build, validate, time, look again at what was timed."""

import time
from collections.abc import Callable

import torch
from attrs import evolve

from ..errors import AgentCompileError, BuildError, Cause, Reject
from ..ir import serial
from ..ir.candidate import CALLABLE, Kernel
from ..ir.record import Measurement
from ..ir.region import Role
from ..ir.verdict import Outcome, Trial, Verdict
from ..ops.reference import compare
from ..plugin.catalog import Catalog
from ..plugin.interfaces import Backend, Validator
from ..runtime.executables import bind_call
from . import timing
from .execution import Execution, Oracles
from .protocol import Evaluation, Job


class WorkerState:
    """What lives as long as the child: the catalog, tried validators, references, framework timings."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.oracles = Oracles()
        self._controls: dict[tuple[str, str], str] = {}
        self._baselines: dict[str, Measurement | Reject] = {}
        self.used: Backend | None = None  # the backend that served last
        self._clocks: dict[str, tuple[float, ...] | Reject] = {}

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
            return Evaluation(failure=_build_cause(str(exc)), message=str(exc)[:2000])
        except Exception as exc:  # a backend's defect costs this candidate
            return Evaluation(failure=Cause.EXCEPTION, message=f"build: {type(exc).__name__}: {exc}"[:2000])

    def evaluate(self, job: Job, kernel: Kernel | None, phase: Callable[[str], None]) -> Evaluation:
        """Validate and time one built candidate."""
        began = time.monotonic()
        execution = self._execution(job, kernel)
        done = execution if isinstance(execution, Evaluation) else self._judged(job, execution, Evaluation(kernel=kernel), phase)
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
        except Exception as exc:  # a defect of the backend or of the implementation costs this candidate
            cause = Cause.CONTRACT if isinstance(exc, AgentCompileError) else cause_of(exc)
            message = f"{'bind' if is_call else 'load'}: {type(exc).__name__}: {exc}"
            return Evaluation(kernel=kernel, failure=cause, message=message[:2000])

    def _judged(self, job: Job, execution: Execution, done: Evaluation, phase: Callable[[str], None]) -> Evaluation:
        try:
            done = evolve(done, verdicts=tuple(self._verdict(name, execution, phase) for name in job.validators))
            if not done.verdicts:
                return evolve(done, failure=Cause.CONTRACT, message="no validator was named, so nothing may be selected")
            failed = next((v for v in done.verdicts if not v.passed), None)
            if failed is not None:
                return evolve(done, failure=failed.cause or Cause.TOLERANCE, message=failed.message)
            if job.time:
                phase("time")
                done = self._timed(job, execution, done)
            return done
        except AgentCompileError as exc:
            return evolve(done, failure=Cause.CONTRACT, message=str(exc)[:2000])
        except Exception as exc:
            return evolve(done, failure=cause_of(exc, execution.backend), message=f"{type(exc).__name__}: {exc}"[:2000])

    def _verdict(self, name: str, execution: Execution, phase: Callable[[str], None]) -> Verdict:
        validator = self.catalog.find("agentcompile_validators", name)
        assert isinstance(validator, Validator)
        phase(f"controls of {name}")
        broken = self._broken(name, validator, execution)
        if broken:
            return Verdict(validator=validator.name, outcome=Outcome.FAIL, cause=Cause.UNAVAILABLE, message=broken)
        phase("check")
        if not validator.applies(execution.trial):
            return Verdict(validator=validator.name, outcome=Outcome.PASS, message="does not apply")
        verdict = validator.check(execution.trial, execution)
        if not isinstance(verdict, Verdict):
            raise AgentCompileError(f"validator {name} returned {type(verdict).__name__}, not Verdict")
        return verdict

    def _broken(self, name: str, validator: Validator, execution: Execution) -> str:
        """Why a validator may not judge: it misjudges one of its own controls. Empty: it may. Tried once per child and backend."""
        key = (name, execution.backend.name)
        if key not in self._controls:
            self._controls[key] = ""
            good, bad = validator.controls(execution.backend)
            kernels: dict[str, Kernel] = {}  # trials often differ in an argument only
            for trial, expected in (*((t, True) for t in good), *((t, False) for t in bad)):
                why = self._control(validator, trial, execution, expected, kernels)
                if why:
                    self._controls[key] = f"validator {name} fails its own controls: {why}"
                    break
        return self._controls[key]

    def _control(self, validator: Validator, trial: Trial, execution: Execution, expected: bool, kernels: dict[str, Kernel]) -> str:
        backend = execution.backend
        here = evolve(trial, target=execution.trial.target)
        code = trial.source.code
        try:
            if code not in kernels:
                kernels[code] = backend.build(here.source, here.target)
            kind = self.catalog.kinds.get(here.match.kind)  # a control need not be of a kind that is installed
            verdict = validator.check(here, Execution(here, backend, backend.load(kernels[code]), kind=kind))
        except Exception as exc:
            return f"{trial.match.id}: {type(exc).__name__}: {exc}"[:500]
        if verdict.passed is expected:
            return ""
        return f"{trial.match.id} {'is good but failed' if expected else 'is bad but passed'} ({verdict.message})"

    def _timed(self, job: Job, execution: Execution, done: Evaluation) -> Evaluation:
        case = job.trial.cases[0]
        possible = self._clock(execution.backend)
        if isinstance(possible, Reject):
            return _provisional(done, possible.reason)
        turn = timing.rotation(job.trial, execution.kind, case, execution.device)
        measured = timing.time_kernel(execution, turn, job.good_enough_us)
        execution.synchronize()
        if isinstance(measured, Reject):
            return evolve(done, failure=Cause.UNAVAILABLE, message=measured.reason)
        if turn.cold and measured.us < timing.TOO_FAST * measured.floor_us:
            why = f"{measured.us:.2f} us is faster than the {measured.floor_us:.2f} us that its bytes need: a bug, not a record"
            return evolve(done, failure=Cause.CONTRACT, message=why)
        wrong = recheck(execution, turn)
        if wrong:
            return evolve(done, failure=Cause.TOLERANCE, message=f"the output that was timed is wrong: {wrong}")
        done = evolve(done, measurement=measured)
        return evolve(done, baseline=self._baseline(job, execution.backend, turn)) if job.baseline else done

    def _clock(self, backend: Backend) -> tuple[float, ...] | Reject:
        if backend.name not in self._clocks:
            self._clocks[backend.name] = backend.time(lambda stream: None, repetitions=1, runs_per_repetition=1)
        return self._clocks[backend.name]

    def _baseline(self, job: Job, backend: Backend, turn: timing.Rotation) -> Measurement | None:
        key = serial.digest(job.trial.graph, job.trial.match)
        if key not in self._baselines:
            self._baselines[key] = timing.time_framework(job.trial, backend, turn)
        found = self._baselines[key]
        return None if isinstance(found, Reject) else found


def _provisional(done: Evaluation, why: str) -> Evaluation:
    verdicts = tuple(evolve(v, outcome=Outcome.PROVISIONAL) for v in done.verdicts)
    return evolve(done, verdicts=verdicts, message=why)


def recheck(execution: Execution, turn: timing.Rotation) -> str:
    """What is wrong with the outputs that the timed runs left in each copy; empty if nothing is.

    States of integers have moved on with every run and are not looked at.
    """
    first = execution.values(turn.copies[0].tensors(Role.OUTPUT))
    roles = (Role.INPUT, Role.WEIGHT, Role.CONSTANT, Role.LENGTH, Role.STATE)
    expected = execution.expected(turn.case, turn.copies[0].tensors(*roles))
    for name, tensor in first.items():
        comparison = compare(tensor, expected[name])
        if not comparison.ok:
            return f"{name}: {comparison.detail}"
    for index in range(1, len(turn.copies)):
        other = execution.values(turn.copies[index].tensors(Role.OUTPUT))
        unequal = [name for name in first if not _same_bits(first[name], other[name])]
        if unequal:
            return f"{', '.join(unequal)} differ between equal copies of the inputs"
    return ""


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))


def _build_cause(message: str) -> Cause:
    text = message.lower()
    if "shared memory" in text:
        return Cause.SHARED_MEMORY
    if "did not finish" in text or "did not answer" in text or "timed out" in text:
        return Cause.TIMEOUT
    return Cause.REGISTERS if "too many registers" in text else Cause.COMPILE


def cause_of(exc: BaseException, backend: Backend | None = None) -> Cause:
    """The class of an exception that running a kernel raised: as its backend says, else by its text."""
    said = backend.cause_of(exc) if backend is not None else None
    if said is not None:
        return said
    text = str(exc).lower()
    if "misaligned" in text:
        return Cause.MISALIGNED
    if any(word in text for word in ("illegal memory access", "illegal address", "out of bounds", "invalid program counter")):
        return Cause.MEMORY_FAULT
    if any(word in text for word in ("launch failed", "launch failure", "illegal instruction", "device-side assert", "trap")):
        return Cause.CRASH
    if "timed out" in text or "timeout" in text:
        return Cause.TIMEOUT
    if "too many resources" in text or "out of resources" in text:
        return Cause.REGISTERS
    return Cause.EXCEPTION
