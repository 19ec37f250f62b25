"""The test that every validator passes: subclass, run pytest.

    class TestMine(ValidatorConformance):
        validator = MyValidator()
        bad = tuple(fake_trial(defect) for defect in ("wrong", "outside"))  # what it must catch

By default its trials run on the doubles of ``agentcompile_core.testing.doubles``, whose kernels misbehave on command.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

from attrs import evolve
from torch import Tensor

from ..errors import Cause
from ..ir.candidate import Kernel
from ..ir.target import Target
from ..ir.verdict import Trial, Verdict
from ..ops.bits import same_bits
from ..plugin.interfaces import Backend, Validator
from ..worker import Evaluation, Job
from ..worker.evaluate import WorkerState
from ..worker.execution import Execution, Result
from ..worker.validating import Validating
from .demands import SHORTEST_REASON, catalog_of, demand, demand_identity, installed
from .doubles import FakeBackend, fake_trial
from .tried import step_of

WRONG = ("wrong", "unwritten", "outside", "input", "nans")  # defects of the doubles that a validator of results must see


class ValidatorConformance:
    """Subclass as ``class Test...``: ``validator``, trials that it must pass (``good``) and refuse (``bad``), their ``backend``.

    ``controls_on`` names the installed backend that its controls are for; empty: ``backend``.
    """

    validator: ClassVar[Validator]
    good: ClassVar[Sequence[Trial]] = (fake_trial("honest"),)
    bad: ClassVar[Sequence[Trial]] = tuple(fake_trial(defect) for defect in WRONG)
    backend: ClassVar[Backend] = FakeBackend()
    controls_on: ClassVar[str] = ""

    def test_identity(self) -> None:
        """It is a Validator with a name, a version and a scope."""
        demand_identity(self.validator, Validator)
        scope = self.validator.scope
        demand(scope in ("candidate", "winner"), f"scope is {scope!r}; use 'candidate' or 'winner'")
        demand(len(self.good) > 0 and len(self.bad) > 0, "good or bad is empty; give at least one trial of each")

    def test_controls_are_judged_rightly(self) -> None:
        """Its own known good trials pass, its known bad ones do not."""
        backend = installed().find("agentcompile_backends", self.controls_on) if self.controls_on else self.backend
        good, bad = self.validator.controls(backend)
        demand(len(good) > 0 and len(bad) > 0, "controls() needs a good and a bad trial: who has never refused anything proves nothing")
        for trial in (*good, *bad):
            here = evolve(trial, target=self.good[0].target)
            expected, done = trial in good, _Unguarded(self.validator, backend).judged(here)
            says = "is good but failed" if expected else "is bad but passed"
            demand((done.failure is None) is expected, f"control {trial.match.id} {trial.source.digest} {says} ({done.message})")

    def test_good_trials_pass(self) -> None:
        """What is right is passed, with the checks that were made."""
        for trial in self.good:
            demand(self._applies(trial), f"{trial.source.digest}: applies() is False, so nothing was judged")
            done = self._judged(trial)
            demand(done.failure is None, f"{trial.source.digest} [{trial.source.code[:60]}] is good but failed: {done.message}")

    def test_bad_trials_are_refused_for_a_reason(self) -> None:
        """What is wrong fails, with a cause and a message that a person can act on."""
        for trial in self.bad:
            what = f"{trial.source.digest} [{trial.source.code[:60].strip()}]"
            done = self._judged(trial)
            demand(done.failure is not None, f"{what} is bad but passed")
            for verdict in done.verdicts:
                demand(isinstance(verdict, Verdict), f"{what}: check() returned {type(verdict).__name__}, not Verdict")
                demand(verdict.cause is not None, f"{what}: the verdict names no cause")
                demand(len(verdict.message) >= SHORTEST_REASON, f"{what}: the message {verdict.message!r} says too little")

    def test_it_survives_what_kernels_do(self) -> None:
        """A kernel that raises is not passed, one that leaves NaN gets a verdict, and a good one passes afterwards."""
        raising, nans = fake_trial("raises"), fake_trial("nans")
        if self._applies(raising):
            done = _Unguarded(self.validator, FakeBackend()).judged(raising)
            demand(done.failure is not None, "a kernel that raises was passed")
        if self._applies(nans):
            done = _Unguarded(self.validator, FakeBackend()).judged(nans)
            demand(done.failure is not Cause.EXCEPTION, f"it cannot judge a kernel that leaves NaN: {done.message}")
        self.test_good_trials_pass()

    def test_what_it_is_given_is_left_as_it_was(self) -> None:
        """Inputs, outputs and references belong to the run: other validators see them too."""
        for trial in (*self.good, *self.bad):
            watched = _Watched(_Unguarded(self.validator, self.backend).execution(trial))
            with suppress(Exception):  # of the kernel; what matters here is what was changed until then
                self.validator.check(trial, watched)
            changed = watched.changed()
            demand(not changed, f"{trial.source.digest}: check() changed {', '.join(changed)}")

    def test_verdicts_are_repeatable(self) -> None:
        """The same trial gets the same outcome and cause again."""
        for trial in (*self.good, *self.bad):
            first, second = (self._judged(trial) for _ in range(2))
            demand(first.failure is second.failure, f"{trial.source.digest}: {first.failure} at first, {second.failure} the second time")

    # ----

    def _applies(self, trial: Trial) -> bool:
        said = self.validator.applies(trial)
        demand(type(said) is bool, f"applies() returned {said!r}; it must return True or False")
        return said

    def _judged(self, trial: Trial) -> Evaluation:
        return _Unguarded(self.validator, self.backend).judged(trial)


class _Uncontrolled(Validating):
    """Takes the validator's word: its controls are a test of their own."""

    def _broken(self, name: str, validator: Validator, backend: Backend, target: Target) -> str:
        return ""

    def _reasoned(self, verdict: Verdict) -> Verdict:
        return verdict  # what it left out is to be seen


class _Unguarded:
    """One validator on one backend in this process, exactly as in the worker."""

    def __init__(self, validator: Validator, backend: Backend) -> None:
        self.validator, self.backend = validator, backend
        self.catalog = catalog_of(validator, backend)
        self.session = WorkerState(self.catalog, validating=_Uncontrolled(self.catalog))

    def judged(self, trial: Trial) -> Evaluation:
        """What the worker would say of ``trial``."""
        job, kernel = self._job(trial), self.session.build(self._job(trial))
        if isinstance(kernel, Evaluation):
            return kernel
        execution = self._loaded(trial, kernel)
        return self.session._judged(job, execution, Evaluation(kernel=kernel), lambda phase: None)

    def execution(self, trial: Trial) -> Execution:
        """``trial``, ready to run."""
        return self._loaded(trial, self.backend.build(trial.source, trial.target))

    def _loaded(self, trial: Trial, kernel: Kernel | None) -> Execution:
        assert kernel is not None  # trials of this kit have sources
        return Execution(trial, self.backend, self.backend.load(kernel), kind=self.catalog.kinds.get(trial.match.kind))

    def _job(self, trial: Trial) -> Job:
        return Job(trial=trial, step=step_of(trial, self.validator.name), backend=f"conformance/{self.backend.name}",
                   validators=(f"conformance/{self.validator.name}",), time=False)


class _Watched:
    """A TrialRun that remembers what it handed out."""

    def __init__(self, execution: Execution) -> None:
        self._execution, self.backend = execution, execution.backend
        self._given: list[tuple[str, Tensor, Tensor]] = []
        self._named: list[tuple[str, Any, dict[str, Any]]] = []  # what was handed out by name, and as it was

    def run(self, case: Any, poison: float) -> Result:
        """As the execution does."""
        result = self._execution.run(case, poison)
        self._keep("input", result.inputs)
        self._keep("output", result.outputs)
        self._named += [("inputs", result.inputs, dict(result.inputs)), ("outputs", result.outputs, dict(result.outputs))]
        return result

    def inputs(self, case: Any, device: str) -> dict[str, Tensor]:
        """As the execution does; what is made for the caller alone it may change."""
        return self._execution.inputs(case, device)

    def expected(self, case: Any, inputs: dict[str, Tensor]) -> Any:
        """As the execution does."""
        found = self._execution.expected(case, inputs)
        for part in ("value", "error", "choices"):
            tensors = {name: getattr(bound, part) for name, bound in found.items()}
            self._keep(f"reference ({part})", {name: tensor for name, tensor in tensors.items() if tensor is not None})
        self._named.append(("reference", found, dict(found)))
        return found

    def values(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """As the execution does."""
        return self._execution.values(outputs)

    def changed(self) -> list[str]:
        """Names of the tensors that are no longer what they were."""
        others = {what for what, now, before in self._named if now.keys() != before.keys() or any(now[n] is not before[n] for n in before)}
        return sorted(others | {name for name, tensor, before in self._given if not same_bits(tensor, before)})

    def _keep(self, what: str, tensors: dict[str, Tensor]) -> None:
        self._given += [(f"{what} {name}", tensor, tensor.clone()) for name, tensor in tensors.items()]


__all__ = ["WRONG", "ValidatorConformance"]
