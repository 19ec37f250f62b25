"""A validator that returns NaN, raises, exits or hangs closes the kernel that it judged, is named, and costs nothing else."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agentcompile_rules_transformers
import pytest
import torch
from addition_module import MODULE

import agentcompile_core as ac
import agentcompile_core.worker
from agentcompile_core.api.arguments import without_reference
from agentcompile_core.configuration import Config
from agentcompile_core.errors import Cause
from agentcompile_core.ir.plan import Parameter, Schedule, ScheduleSpace
from agentcompile_core.ir.verdict import Check, Outcome, Verdict
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.events import Skipped
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.store import Store
from agentcompile_core.testing import bad_validators, doubles
from agentcompile_core.worker import Worker
from agentcompile_core.worker.evaluate import WorkerState
from agentcompile_core.worker.protocol import Job
from agentcompile_core.worker.validating import SILENT

CATALOG = "agentcompile_core.testing.bad_validators:catalog"
NAMED = {"dies": "code 9", "hangs": "no end of check by candidate_hangs within 2 s"}


class TwoSpeeds(doubles.FakeFamily):
    """Two honest kernels: the faster one is what the validators misbehave on."""

    def space(self, match: Any, target: Any) -> ScheduleSpace:
        parameters = (Parameter(name="behave", values=("honest",)), Parameter(name="us", values=(2.0, 4.0)))
        return ScheduleSpace(parameters=parameters, points=tuple(Schedule({"behave": "honest", "us": us}) for us in (2.0, 4.0)))


def compiled(folder: Path, validators: tuple[str, ...], budget_s: float = 60.0, **more: Any) -> Any:
    """The addition, compiled with two kernels under ``validators`` and run on the backend of doubles."""
    (folder / "addition.py").write_text(MODULE)
    every = list(bad_validators.catalog().validators.values())
    offers = SimpleNamespace(agentcompile_template_families=hookimpl(lambda: [TwoSpeeds()]),
                             agentcompile_backends=hookimpl(lambda: [doubles.FakeBackend()]),
                             agentcompile_validators=hookimpl(lambda: every))
    catalog = load_catalog(only=(), extra=[("doubles", offers), ("rules", agentcompile_rules_transformers)])
    return ac.compile(str(folder / "addition.py"), device="cpu", run_on="fake", catalog=catalog, store=Store(None),
                      config=Config(validators=validators, backend="fake", rounds=1, budget_s=budget_s), **more)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    made = partial(Worker, catalog=CATALOG, builders=1)
    monkeypatch.setattr(agentcompile_core.worker, "Worker", lambda **given: made(**{**given, "deadlines_s": {"check": 2.0}}))


def assert_only_the_fast_kernel_is_closed(model: Any, validator: str) -> None:
    (selection,) = model.compilation.selections
    assert [s.step.schedule["us"] for s in selection.steps] == [4.0]
    closed = {r.step.schedule["us"]: r for r in model.compilation.records if r.failure is not None}
    assert set(closed) == {2.0} and validator in closed[2.0].message, closed
    (failure,) = model.compilation.failures
    assert validator in failure.message and failure.cause is closed[2.0].failure
    a, b = torch.arange(100.0), torch.ones(100)
    assert torch.equal(model(a, b), a + b)


@pytest.mark.parametrize("how", ["nan", "hangs"])
def test_compile_goes_on_with_the_other_kernel(how: str, tmp_path: Path, worker: None) -> None:
    assert_only_the_fast_kernel_is_closed(compiled(tmp_path, ("simple", f"candidate_{how}")), f"candidate_{how}")


def test_a_note_says_where_nobody_compares_with_the_reference(tmp_path: Path, worker: None) -> None:
    said = [note for note in compiled(tmp_path, ("simple",)).notes if note.startswith("validators: ")]
    assert said == ["validators: numerics is not among those that judge (simple), so kernels may be selected whose results nobody compared "
                    "with the reference; add it to validators"]
    for names in (("numerics",), ("simple", "numerics"), ("numerics/numerics",), ()):  # of nobody's selection there is nothing to say
        assert without_reference(Config(validators=names)) == ()


def test_what_ran_when_the_time_was_over_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = partial(Worker, catalog=CATALOG, builders=1), list[Any]()
    monkeypatch.setattr(agentcompile_core.worker, "Worker", lambda **given: made(**{**given, "deadlines_s": {"check": 100.0}}))
    compiled(tmp_path, ("simple", "candidate_hangs"), budget_s=4.0, report=seen.append)
    said = [(event.subject, event.message) for event in seen if isinstance(event, Skipped) and "the time was used up" in event.message]
    assert [message for _, message in said] == ["the time was used up during check by candidate_hangs"] and "us=2.0" in said[0][0]


@pytest.mark.parametrize("how", ["base"])
def test_compile_goes_on_where_a_validator_of_winners_misbehaves(how: str, tmp_path: Path, worker: None) -> None:
    assert_only_the_fast_kernel_is_closed(compiled(tmp_path, ("simple", f"winner_{how}")), f"winner_{how}")


class Elsewhere(bad_validators.UncontrolledValidator):
    """Has nothing to say of what this backend runs."""

    name = "silent_uncontrolled"

    def applies(self, trial: Any) -> bool:
        return False


class Terse(doubles.SimpleValidator):
    """Refuses what is fast, and says as much as a test lets it."""

    name = "terse"

    def __init__(self, **said: Any) -> None:
        self.said = said

    def check(self, trial: Any, run: Any) -> Verdict:
        found = super().check(trial, run)
        return Verdict(validator=self.name, outcome=Outcome.FAIL, **self.said) if "us=2.0" in trial.source.code else found


def evaluated(*validators: str, **said: Any) -> Any:
    from agentcompile_core.ir.plan import Origin, Step

    step = Step(match_id="elementwise:add+1:add", implementation="doubles/fake_family", origin=Origin.GENERATED, schedule=Schedule({}))
    catalog = bad_validators.catalog()
    catalog.offers["agentcompile_validators"]["bad/silent_uncontrolled"] = Elsewhere()
    catalog.offers["agentcompile_validators"]["bad/terse"] = Terse(**said)
    session = WorkerState(catalog)
    jobs = [Job(trial=doubles.fake_trial("honest", us), step=step, backend="fake", validators=validators) for us in (2.0, 4.0, 2.0)]
    return [session.evaluate(job, session.build(job), lambda phase: None) for job in jobs]


@pytest.mark.parametrize("how", sorted(set(bad_validators.HOW) - set(NAMED)))
def test_whatever_it_returns_or_raises_is_a_refusal_by_name(how: str) -> None:
    fast, slow, again = evaluated("simple", f"candidate_{how}")
    assert slow.failure is None and slow.measurement is not None
    for found in (fast, again):
        assert (found.failure, found.measurement) == (Cause.EXCEPTION, None)
        assert f"the validator candidate_{how} " in found.message and found.verdicts[-1].validator == f"candidate_{how}"


@pytest.mark.parametrize(("verdict", "message"), [
    ({}, "refused by terse, which gave no reason"),
    ({"checks": (Check(name="normal", outcome=Outcome.FAIL, detail="out[3] is 2, not 1"),)}, "normal: out[3] is 2, not 1"),
    ({"message": "it is wrong"}, "it is wrong")])
def test_a_refusal_without_a_reason_is_told_as_one(verdict: dict[str, Any], message: str) -> None:
    found = evaluated("terse", **verdict)[0]
    assert (found.failure, found.message) == (Cause.TOLERANCE, message)
    assert (found.verdicts[-1].cause, found.verdicts[-1].message) == (Cause.TOLERANCE, message)


def test_one_that_does_not_say_whether_it_applies_closes_the_kernel() -> None:
    assert {e.failure for e in evaluated("simple", "unsure")} == {Cause.EXCEPTION}


def test_a_kernel_that_no_validator_says_anything_about_is_not_used() -> None:
    found = evaluated("silent")
    assert {e.failure for e in found} == {Cause.CONTRACT} and "has anything to say" in found[0].message
    assert evaluated("silent", "simple")[1].failure is None


def test_one_whose_controls_raise_never_judges() -> None:
    found = evaluated("uncontrolled")
    assert [e.failure for e in found] == [Cause.UNAVAILABLE] * 3, "also the second time"
    assert all("fails its own controls: they raised SystemExit: the controls are on another machine" in e.message for e in found)


@pytest.mark.parametrize(("name", "which"), [
    ("without_controls", "no trial that it must pass and none that it must refuse on the"),
    ("without_bad_controls", "no trial that it must refuse on the")])
def test_one_without_controls_never_judges(name: str, which: str) -> None:
    found = evaluated(name)
    assert [e.failure for e in found] == [Cause.UNAVAILABLE] * 3
    assert all(f"validator {name} fails its own controls: controls() gives no trial that it must" in e.message for e in found)
    assert which in found[0].message
    assert found[0].message.endswith("on the backend fake, so nothing shows that it works; give at least one of each")


def test_one_that_does_not_apply_needs_no_controls_here() -> None:
    """Emulation of one language has none for backends of others, and nothing to say of their kernels."""
    found = evaluated("simple", "silent_uncontrolled")
    assert {e.failure for e in found} == {None} and {e.verdicts[-1].message for e in found} == {SILENT}


def test_what_a_kernel_raises_is_no_fault_of_the_validator() -> None:
    from agentcompile_core.ir.plan import Origin, Step

    step = Step(match_id="elementwise:add+1:add", implementation="doubles/fake_family", origin=Origin.GENERATED, schedule=Schedule({}))
    session = WorkerState(bad_validators.catalog())
    job = Job(trial=doubles.fake_trial("raises"), step=step, backend="fake", validators=("simple",))
    found = session.evaluate(job, session.build(job), lambda phase: None)
    assert found.failure is Cause.EXCEPTION and found.verdicts == () and "validator" not in found.message
