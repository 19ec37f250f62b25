"""Validators that misbehave on command, where a fake kernel says ``us`` below 3; of all others they say what a simple one says."""

import os
import time
from collections.abc import Callable
from typing import Any

from attrs import evolve

from ..ir.verdict import Check, Outcome, Trial, Verdict
from ..plugin.catalog import OFFERS, Catalog
from ..plugin.interfaces import Backend, TrialRun
from . import doubles

FAST_US = 3.0


class _MemoryShortage(BaseException):
    """No Exception, so that a handler of those does not see it."""


def _raised(error: BaseException) -> Callable[[Verdict], Any]:
    def misbehave(verdict: Verdict) -> Any:
        raise error

    return misbehave


def _with_check(**changes: Any) -> Callable[[Verdict], Any]:
    check = Check(name="seen", outcome=Outcome.PASS)
    return lambda verdict: evolve(verdict, checks=(evolve(check, **changes),))


HOW: dict[str, Callable[[Verdict], Any]] = {
    "nan": _with_check(max_abs=float("nan")),
    "infinite": _with_check(budget_use=float("inf")),
    "raises": _raised(KeyError("the table of limits has no row for it")),
    "exits": _raised(SystemExit(3)),
    "interrupts": _raised(KeyboardInterrupt()),
    "base": _raised(_MemoryShortage("not an Exception")),
    "hangs": lambda verdict: time.sleep(1e6),
    "dies": lambda verdict: os._exit(9),
    "none": lambda verdict: None,
    "number": lambda verdict: float("nan"),
    "contradicts": _with_check(outcome=Outcome.FAIL),
    "renamed": lambda verdict: evolve(verdict, validator="simple"),
    "mistyped": lambda verdict: evolve(verdict, outcome="pass"),  # type: ignore[arg-type]
}


class Misbehaving(doubles.SimpleValidator):
    """A simple validator that does what ``how`` says where the kernel claims to be fast."""

    def __init__(self, how: str, scope: str) -> None:
        self.name = f"{scope}_{how}"  # type: ignore[misc]
        self.scope = scope  # type: ignore[assignment,misc]
        self._how = HOW[how]

    def check(self, trial: Trial, run: TrialRun) -> Verdict:
        """A verdict, or whatever else it is told to give."""
        found = super().check(trial, run)
        fast = float(trial.source.code.rpartition("us=")[2]) < FAST_US
        return self._how(found) if fast else found


class UnsureValidator(doubles.SimpleValidator):
    """Does not say whether it applies."""

    name = "unsure"

    def applies(self, trial: Trial) -> bool:
        """Neither True nor False."""
        return None  # type: ignore[return-value]


class SilentValidator(doubles.SimpleValidator):
    """Never applies."""

    name = "silent"

    def applies(self, trial: Trial) -> bool:
        """Never."""
        return False


class OneSidedValidator(doubles.SimpleValidator):
    """Passes everything, and shows with no control that it can refuse, or with none at all."""

    def __init__(self, name: str, good: int) -> None:
        self.name = name  # type: ignore[misc]
        self._good = good

    def controls(self, backend: Backend) -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
        """No bad one."""
        return (doubles.fake_trial("honest"),) * self._good, ()

    def check(self, trial: Trial, run: TrialRun) -> Verdict:
        """Always a pass."""
        return Verdict(validator=self.name, outcome=Outcome.PASS)


class UncontrolledValidator(doubles.SimpleValidator):
    """Its controls raise."""

    name = "uncontrolled"

    def controls(self, backend: Backend) -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
        """None."""
        raise SystemExit("the controls are on another machine")


def catalog() -> Catalog:
    """The catalog of the doubles, with these validators in it."""
    made = doubles.catalog()
    hook = next(hook for hook, kind in OFFERS.items() if issubclass(doubles.SimpleValidator, kind))
    several = [Misbehaving(how, scope) for how in HOW for scope in ("candidate", "winner")]
    for offer in (*several, UnsureValidator(), SilentValidator(), UncontrolledValidator(),
                  OneSidedValidator("without_controls", 0), OneSidedValidator("without_bad_controls", 1)):
        made.offers[hook][f"bad/{offer.name}"] = offer
    return made
