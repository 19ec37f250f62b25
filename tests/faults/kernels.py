"""Kernels that are wrong, fatal or endless, and clocks that lie: each is refused for the stated reason, and the program is right."""

from pathlib import Path
from typing import Any

from agentcompile_core.ir.plan import Parameter, Schedule, ScheduleSpace
from agentcompile_core.report import audit
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles
from agentcompile_core.testing.fake_kernels import BEHAVIOURS

from . import cheap
from .registry import add, fault
from .seen import right, told

KEPT = "the honest kernel was selected, the program is right"
CHILD = "agentcompile_core.testing.doubles:catalog"
REASONS = {  # behaviour: cause, part of the message
    "wrong": ("tolerance", "beyond the budget"), "nans": ("tolerance", "of 100 elements"), "unwritten": ("tolerance", "element"),
    "outside": ("memory_fault", ""), "input": ("tolerance", ""),
}
FATAL = {"abort": "SIGABRT", "segfault": "SIGSEGV", "exit": "exited with code 7", "hang": "no end of check", "raises": "told to fail"}


def record_of(made: Any, behaviour: str) -> Any:
    """The record of the one candidate that does ``behaviour``, which was refused; the honest one serves."""
    right(made)
    (selection,) = made.compilation.selections
    assert [str(s.step.schedule["behave"]) for s in selection.steps] == ["honest"], "the honest kernel was not selected"
    (record,) = [r for r in made.compilation.records if dict(r.step.schedule.items).get("behave") == behaviour]
    assert record.failure is not None and not record.usable, f"{behaviour} was let through"
    c = made.compilation
    assert all(d.follows for d in audit.audit(c.selections, c.records, c.decisions, c.programs))
    return record


def _kernel(behaviour: str, words: str, workers: str) -> Any:
    def run(folder: Path) -> str:
        made = cheap.compiled(cheap.module(folder), Store(folder / "store"), family=cheap.Family(behaviour, "honest"), workers=workers)
        record = record_of(made, behaviour)
        assert words in record.message, record.message
        assert workers == cheap.HERE or behaviour == "raises" or told(made, words, folder)
        return f"{record.failure.value}: {record.message}"

    return run


for _name, (_cause, _words) in REASONS.items():
    add("kernels", f"a kernel that {BEHAVIOURS[_name]}", f"a candidate {doubles.BEHAVIOURS[_name]}",
        _kernel(_name, _words, cheap.HERE), KEPT)
for _name, _words in FATAL.items():
    add("kernels", f"a kernel that {BEHAVIOURS[_name]}", f"a candidate {doubles.BEHAVIOURS[_name]}", _kernel(_name, _words, CHILD),
        f"only that candidate was lost: {KEPT}")


@fault("kernels", "a candidate writes to standard output, where answers of the worker go", KEPT)
def _a_kernel_that_prints(folder: Path) -> str:
    made = cheap.compiled(cheap.module(folder), Store(folder / "store"), family=cheap.Family("prints"), workers=CHILD)
    right(made)
    (record,) = [r for r in made.compilation.records if dict(r.step.schedule.items).get("behave") == "prints"]
    assert record.usable
    return "what it printed was taken for no answer; it was judged like any other"


@fault("kernels", "every candidate is wrong", "the framework runs, the result is right")
def _no_kernel_that_is_right(folder: Path) -> str:
    made = cheap.compiled(cheap.module(folder), Store(folder / "store"), family=cheap.Family("wrong", "nans"), workers=cheap.HERE)
    right(made)
    (selection,) = made.compilation.selections
    assert not selection.steps
    return next(why for _, why in selection.fallback_reasons if "candidates failed" in why)


@fault("kernels", "a validator lets its own bad control pass", "nothing that it judged was selected; the framework runs")
def _a_validator_that_lets_everything_pass(folder: Path) -> str:
    made = cheap.compiled(cheap.module(folder), Store(folder / "store"), workers=cheap.HERE, validators=("broken",),
                          extra=(("acme", cheap.offers(validators=doubles.BrokenValidator())),))
    right(made)
    assert not made.compilation.selections[0].steps
    return told(made, "control", folder)


TIMES = {"stops": "works sixteen times and returns at once from then on", "lazy": "returns at once where an answer lies already",
         "caches": "keeps its results by address", "input_later": "changes its input later on",
         "outside_later": "writes past the end later on", "lies": "works a few times and not any more",
         "nan_time": "has a time that is no number", "too_fast": "is faster than memory"}
for _name, _what in TIMES.items():
    add("timing", f"a kernel that {_what}", f"a candidate {BEHAVIOURS[_name]}", _kernel(_name, "", cheap.HERE), KEPT)


class Times(doubles.FakeFamily):
    """Honest kernels of several times in microseconds."""

    def __init__(self, *times_us: float) -> None:
        self.times_us = times_us

    def space(self, match: Any, target: Any) -> ScheduleSpace:
        """One point per time."""
        points = tuple(Schedule({"behave": "honest", "us": us}) for us in self.times_us)
        parameters = (Parameter(name="behave", values=("honest",)), Parameter(name="us", values=self.times_us))
        return ScheduleSpace(parameters=parameters, points=points)


def _times(*times_us: float) -> Any:
    return lambda folder: cheap.compiled(cheap.module(folder), Store(folder / "store"), workers=cheap.HERE, family=Times(*times_us))


def _not_faster(*times_us: float) -> Any:
    def run(folder: Path) -> str:
        made = _times(*times_us)(folder)
        right(made)
        (selection,) = made.compilation.selections
        assert not selection.steps, "a kernel that is not faster was selected"
        return next(why for _, why in selection.fallback_reasons if "not faster" in why)

    return run


add("timing", "kernels that are slower than the framework", "every candidate takes 12 us, the framework 10", _not_faster(12.0),
    "the framework runs")
add("timing", "a kernel that is faster by less than the noise", "a candidate takes 9.99 us, the framework 10.01", _not_faster(9.99),
    "the framework runs")


@fault("timing", "the first of several schedules is the slowest", "the fastest was selected, the program is right")
def _a_first_guess_that_is_slow(folder: Path) -> str:
    made = _times(9.0, 3.0, 6.0)(folder)
    right(made)
    (step,) = made.compilation.selections[0].steps
    assert step.step.schedule["us"] == 3.0
    return step.reason


@fault("timing", "the framework cannot be timed", "no kernel is called faster, the framework runs")
def _a_framework_without_a_time(folder: Path) -> str:
    real, doubles.FRAMEWORK_US = doubles.FRAMEWORK_US, float("nan")
    try:
        made = _times(5.0)(folder)
    finally:
        doubles.FRAMEWORK_US = real
    right(made)
    (selection,) = made.compilation.selections
    assert not selection.steps
    return "; ".join(why for _, why in selection.fallback_reasons)


@fault("timing", "the time for the search is used up at once", "the framework runs, and what was not tried is said")
def _no_time_at_all(folder: Path) -> str:
    made = cheap.compiled(cheap.module(folder), Store(folder / "store"), workers=cheap.HERE, budget_s=1e-6)
    right(made)
    reasons = {reason for tried in made.compilation.tried for reason, _ in tried.untried}
    assert reasons and not made.compilation.selections[0].steps
    return "; ".join(sorted(reasons))
