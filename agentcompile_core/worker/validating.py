"""Validators inside the child: each is tried on its own controls once, and whatever it does closes the kernel that it judges, no more."""

from collections.abc import Callable
from typing import Any

from attrs import evolve

from ..errors import BuildError, Cause, UsageError, one_line
from ..ir import serial
from ..ir.candidate import Kernel
from ..ir.target import Target
from ..ir.verdict import Outcome, Trial, Verdict
from ..plugin.catalog import Catalog
from ..plugin.interfaces import Backend, Validator
from .causes import cause_of
from .execution import Execution
from .given import GivenRun

SILENT = "does not apply"  # the message of a verdict that says nothing about the kernel
_OF_KERNELS = (Cause.MEMORY_FAULT, Cause.MISALIGNED, Cause.CRASH)  # a device reports these late, to whoever asks it next


class Validating:
    """The validators of one child, with what is known of their controls per backend."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._controls: dict[tuple[str, str], str] = {}

    def verdict(self, name: str, execution: Execution, phase: Callable[[str], None]) -> Verdict:
        """What the validator called ``name`` says of a candidate. What it raises or returns besides a verdict is a refusal that names it.

        Raises:
            Exception: what running the kernel raised; that is no matter of the validator.
        """
        validator = self._catalog.find("agentcompile_validators", name)
        assert isinstance(validator, Validator)
        phase(f"controls of {name}")
        try:
            applies = validator.applies(execution.trial)
        except BaseException as exc:
            return _raised(validator, exc, execution)
        if applies is False:  # its controls do not matter then: there need be none for this backend
            return Verdict(validator=validator.name, outcome=Outcome.PASS, message=SILENT)
        if applies is not True:
            return _refusal(validator, f"answered {applies!r} to whether it applies, not True or False")
        broken = self._broken(name, validator, execution.backend, execution.trial.target)
        if broken:
            return Verdict(validator=validator.name, outcome=Outcome.FAIL, cause=Cause.UNAVAILABLE, message=broken)
        phase(f"check by {name}")
        try:
            found = validator.check(execution.trial, GivenRun(execution))
        except BaseException as exc:
            return _raised(validator, exc, execution)
        why = wrong_with(found, validator.name)
        return _refusal(validator, why) if why else self._reasoned(found)

    def _reasoned(self, verdict: Verdict) -> Verdict:
        """A refusal with a cause and a sentence, whatever its validator left out."""
        if verdict.passed or (verdict.cause is not None and verdict.message):
            return verdict
        failed = next((f"{check.name}: {check.detail}" for check in verdict.checks if check.outcome is Outcome.FAIL and check.detail), "")
        message = verdict.message or failed or f"refused by {verdict.validator}, which gave no reason"
        return evolve(verdict, cause=verdict.cause or Cause.TOLERANCE, message=message)

    def prove(self, name: str, backend: Backend, target: Target) -> None:
        """Try the validator called ``name`` on its controls now, so that the first candidate need not wait for it."""
        validator = self._catalog.find("agentcompile_validators", name)
        assert isinstance(validator, Validator)
        self._broken(name, validator, backend, target)

    def _broken(self, name: str, validator: Validator, backend: Backend, target: Target) -> str:
        """Why a validator may not judge: it misjudges one of its own controls. Empty: it may. Tried once per child and backend."""
        key = (name, backend.name)
        if key not in self._controls:
            why = self._misjudged(validator, backend, target)
            self._controls[key] = f"validator {name} fails its own controls: {why}" if why else ""
        return self._controls[key]

    def _misjudged(self, validator: Validator, backend: Backend, target: Target) -> str:
        try:
            good, bad = validator.controls(backend)
            trials = [*((t, True) for t in good), *((t, False) for t in bad)]
        except BaseException as exc:
            return one_line(f"they raised {type(exc).__name__}: {exc}", 500)
        absent = [what for what, some in (("must pass", tuple(good)), ("must refuse", tuple(bad))) if not some]
        if absent:  # one that has never refused anything, or never passed anything, may always say the same
            return (f"controls() gives no trial that it {' and none that it '.join(absent)} on the backend {backend.name}, so nothing "
                    "shows that it works; give at least one of each")
        kernels: dict[str, Kernel | None] = {}  # trials often differ in an argument only
        here = ((evolve(trial, target=target), expected) for trial, expected in trials)
        return next((why for trial, expected in here if (why := self._control(validator, trial, backend, expected, kernels))), "")

    def _control(self, validator: Validator, trial: Trial, backend: Backend, expected: bool, kernels: dict[str, Kernel | None]) -> str:
        code = trial.source.code
        try:
            if code not in kernels:
                kernels[code] = _built(trial, backend, expected)
            kind = self._catalog.kinds.get(trial.match.kind)  # a control need not be of a kind that is installed
            kernel = kernels[code]
            execution = Execution(trial, backend, None if kernel is None else backend.load(kernel), kind=kind)
            verdict = validator.check(trial, GivenRun(execution))
        except BaseException as exc:
            return one_line(f"{trial.match.id}: {type(exc).__name__}: {exc}", 500)
        wrong = wrong_with(verdict, validator.name)
        if wrong:
            return f"{trial.match.id}: it {wrong}"
        if verdict.passed is expected:
            return ""
        return f"{trial.match.id} {'is good but failed' if expected else 'is bad but passed'} ({verdict.message})"


def _built(trial: Trial, backend: Backend, good: bool) -> Kernel | None:
    """The kernel of a control; None for a bad one that the backend refuses to build: a validator may still see in its text what is wrong.

    Raises:
        BuildError: a good one does not build.
    """
    try:
        return backend.build(trial.source, trial.target)
    except BuildError:
        if good:
            raise
        return None


def wrong_with(verdict: Any, name: str) -> str:
    """Why ``verdict`` of the validator called ``name`` is none that may be believed; empty: it may be.

    It is no Verdict, or another validator's, holds a number that is none, or passes what a check of its own failed.
    """
    if not isinstance(verdict, Verdict):
        return f"returned {type(verdict).__name__}, not Verdict"
    try:
        same = serial.loads(serial.dumps(verdict), Verdict) == verdict
    except (UsageError, ValueError, TypeError, AttributeError) as exc:
        return f"returned a verdict that cannot be kept: {exc}"
    if verdict.validator != name:
        return f"returned a verdict in the name of {verdict.validator!r}; a verdict carries its own validator's name"
    if not same:
        return "returned a verdict of other types than a Verdict holds"
    failed = next((check for check in verdict.checks if check.outcome is Outcome.FAIL), None)
    return f"passed a kernel whose check {failed.name!r} failed" if verdict.passed and failed is not None else ""


def _raised(validator: Validator, exc: BaseException, execution: Execution) -> Verdict:
    """The refusal that what a validator raised ends in. Raises it again where it is the kernel's."""
    if exc is execution.fault or cause_of(exc, execution.backend) in _OF_KERNELS:
        raise exc
    return _refusal(validator, f"raised {type(exc).__name__}: {exc}")


def _refusal(validator: Validator, why: str) -> Verdict:
    message = f"the validator {validator.name} {why}; a kernel that it did not judge is not used"
    return Verdict(validator=validator.name, outcome=Outcome.FAIL, cause=Cause.EXCEPTION, message=message[:2000])
