"""Lower, validate and select over doubles: only evidence selects, what is known is not measured again, every no has a reason."""

import pytest
from agentcompile_cuda_kit.targets import PRESETS
from attrs import evolve
from select_cases import FAMILY, MATCH, context, plan, run, step, validated

from agentcompile_core.errors import Cause
from agentcompile_core.ir.search_log import Reason
from agentcompile_core.ir.selection import Basis
from agentcompile_core.plugin.events import CandidateFinished, Event
from agentcompile_core.stages import lower, select, validate
from agentcompile_core.testing import doubles
from agentcompile_core.worker import Worker


@pytest.fixture(scope="module")
def worker():
    with Worker(catalog="agentcompile_core.testing.doubles:catalog", deadlines_s={"check": 3.0}, builders=2) as made:
        yield made


@pytest.fixture
def ctx(worker: Worker):
    made: list[Event] = []
    return context(worker).watched(made.append), made


@pytest.fixture(autouse=True)
def _no_surprises(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AGENTCOMPILE_STRICT", "0")


def test_the_fastest_valid_step_is_selected_and_the_rest_is_recorded(ctx):
    made, events = ctx
    records, selection = run(made, step("wrong", 1.0), step("honest", 7.0), step("abort", 1.0), step("honest", 3.0))
    assert selection.basis is Basis.MEASURED
    assert selection.steps[0].step == step("honest", 3.0)
    assert selection.region_us == pytest.approx(3.0, rel=0.01)
    assert selection.baseline_us == pytest.approx(doubles.FRAMEWORK_US, rel=0.01)
    assert "of the framework" in selection.steps[0].reason
    causes = {r.step.schedule["us"]: r.failure for r in records if r.step.implementation == FAMILY and r.failure}
    assert set(causes.values()) <= {Cause.TOLERANCE, Cause.CRASH}
    assert len([r for r in records if r.failure]) == 2
    finished = [event for event in events if isinstance(event, CandidateFinished)]
    assert len(finished) == 4 and not any(event.cached for event in finished)
    assert finished[-1].baseline_us == pytest.approx(doubles.FRAMEWORK_US, rel=0.01)
    assert [f.cause for f in made.failures] == [Cause.CRASH]


def test_a_warm_run_builds_and_times_nothing(ctx):
    made, _ = ctx
    steps = (step("honest", 4.0), step("wrong", 2.0))
    first, chosen = run(made, *steps)
    cold = context(worker=None)
    cold.store = made.store
    cold.worker = _Forbidden()
    again, warm = run(cold, *steps)
    assert warm == chosen
    assert {r.step for r in again} == {r.step for r in first}


def test_evidence_of_another_library_is_not_used_again(ctx, monkeypatch: pytest.MonkeyPatch):
    made, _ = ctx
    first, _ = run(made, step("honest", 4.0))
    monkeypatch.setattr(doubles.FakeBackend, "library_digest", lambda self, language: f"a new release for {language}")
    upgraded = context(made.worker)
    upgraded.store = made.store
    again, _ = run(upgraded, step("honest", 4.0))
    keys = [{r.key for r in records if r.step.implementation == FAMILY} for records in (first, again)]
    assert keys[0] and keys[1] and not keys[0] & keys[1]


def test_schedules_that_lower_to_one_source_are_evaluated_once(ctx):
    # Two timings under one key would make a warm run see other numbers than the cold one.
    made, _ = ctx
    records, selection = run(made, step("honest", 4.0), step("honest", 4.0), step("honest", 6.0))
    assert [r.step.schedule["us"] for r in records if r.step.implementation == FAMILY] == [4.0, 6.0]
    assert len({r.key for r in records}) == len(records)
    assert selection.steps[0].step == step("honest", 4.0)


class _Forbidden:
    def prepare(self, *args: object) -> None:
        """Asked right before ``evaluate``."""

    def evaluate(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("a warm run evaluated something")


def test_a_warm_run_does_not_go_on_where_time_ran_out(ctx):
    made, _ = ctx
    ordered = (plan(step("honest", 4.0), step("hang"), step("honest", 3.0)),)
    records = validated(made, ordered, 2.0)
    assert [r.step for r in records if r.measurement and r.step.implementation == FAMILY] == [step("honest", 4.0)]
    warm = context(worker=None)
    warm.store, warm.worker = made.store, _Forbidden()
    again = validated(warm, ordered)
    assert {r.step for r in again} == {r.step for r in records}
    later = (evolve(plan(step("honest", 2.0)), record=evolve(ordered[0].record, round=1)),)
    assert not [r for r in validated(warm, later) if r.step.implementation == FAMILY]
    patient = context(worker=made.worker, budget_s=500.0)
    patient.store = made.store
    found = validated(patient, ordered)
    assert {r.failure for r in found} == {None, Cause.TIMEOUT}


def test_validators_of_winners_judge_the_best_until_one_passes(worker: Worker):
    made = context(worker, validators=("simple", "picky"))
    records, selection = run(made, step("honest", 2.0), step("honest", 3.0), step("honest", 5.0), step("honest", 6.0))
    assert selection.steps[0].step == step("honest", 5.0)
    refused = {r.step.schedule["us"]: r for r in records if r.failure}
    assert set(refused) == {2.0, 3.0}
    assert "a race that only this validator sees" in refused[2.0].message
    warm = context(worker=None, validators=("simple", "picky"))
    warm.store, warm.worker = made.store, _Forbidden()
    assert run(warm, step("honest", 2.0), step("honest", 3.0), step("honest", 5.0), step("honest", 6.0))[1] == selection


def test_a_validator_that_cannot_judge_ends_the_search_and_leaves_no_records(worker: Worker):
    made = context(worker, validators=("broken",))
    records, selection = run(made, step("honest", 4.0), step("honest", 3.0))
    assert [r.failure for r in records] == [Cause.UNAVAILABLE]
    assert [(f.plugin, f.cause) for f in made.failures] == [("broken", Cause.UNAVAILABLE)]
    assert selection.basis is Basis.FALLBACK
    assert "fails its own controls" in dict(selection.fallback_reasons)[MATCH]
    assert made.store.describe()["records"] == 0
    again, _ = run(made, step("honest", 4.0))
    assert [r.failure for r in again] == [Cause.UNAVAILABLE]  # asked again, not remembered


def test_a_kernel_that_raises_is_in_the_failures_and_costs_only_itself(ctx):
    made, _ = ctx
    _, selection = run(made, step("raises"), step("honest", 4.0))
    assert selection.steps[0].step == step("honest", 4.0)
    assert [(f.plugin, f.cause) for f in made.failures] == [(FAMILY, Cause.EXCEPTION)]
    assert "the fake kernel was told to fail" in made.failures[0].message


def test_another_target_or_compiler_is_another_key(ctx, worker: Worker):
    made, _ = ctx
    run(made, step("honest", 4.0))
    other = context(worker=None)
    other.store, other.target = made.store, PRESETS["h100"]
    other.worker = _Forbidden()
    with pytest.raises(AssertionError):
        run(other, step("honest", 4.0))


def test_slower_than_the_framework_stays_on_it_with_a_reason(ctx):
    made, _ = ctx
    _, selection = run(made, step("honest", 9.95), step("honest", 30.0))
    assert selection.basis is Basis.FALLBACK
    assert selection.steps == ()
    assert any("not faster beyond noise and margin" in why for _, why in selection.fallback_reasons)


def test_a_margin_below_zero_lets_slower_kernels_pass(worker: Worker):
    made = context(worker, margin=-1.0)
    _, selection = run(made, step("honest", 9.95), step("honest", 30.0))
    assert [s.step for s in selection.steps] == [step("honest", 9.95)] and selection.basis is Basis.MEASURED
    _, alone = run(made, step("honest", 30.0))
    assert [s.step for s in alone.steps] == [step("honest", 30.0)], "slower than the framework, and nothing but a clock was against it"


def test_when_all_fail_the_reason_counts_them(ctx):
    made, _ = ctx
    _, selection = run(made, step("wrong"), step("no_build"))
    (reason,) = [why for what, why in selection.fallback_reasons if what == MATCH]
    assert "all 2 candidates failed" in reason
    assert "1 compile" in reason
    assert "1 tolerance" in reason


def test_without_a_clock_one_pass_is_enough_and_provisional(worker: Worker):
    made = context(worker)
    made.backend = made.catalog.backends["doubles/no_time"]
    records, selection = run(made, step("wrong"), step("honest", 7.0), *(step("honest", 10.0 + i) for i in range(9)))
    assert selection.basis is Basis.PROVISIONAL
    assert selection.steps[0].step == step("honest", 7.0)
    assert "never used on a GPU" in selection.steps[0].reason
    assert len(records) <= 5


def test_what_earlier_rounds_settled_is_what_they_hand_in_and_not_what_the_store_holds(worker: Worker):
    made = context(worker)
    made.backend = made.catalog.backends["doubles/no_time"]
    records = validated(made, (plan(step("honest", 7.0)),))
    second = plan(step("honest", 9.0))
    later = (evolve(second, record=evolve(second.record, round=1)),)
    found = validate.run(lower.run(later, made), later, 60.0, made, records)
    assert found.records == () and [u.reason for u in found.untried] == [Reason.SETTLED]
    other = (evolve(later[0], steps=(step("honest", 11.0),)),)
    assert [r.step for r in validated(made, other)] == [step("honest", 11.0)], "nothing was handed in, so nothing is settled"


def test_without_a_backend_nothing_is_selected():
    made = context()
    made.backend = None
    records, selection = run(made, step("honest"))
    assert records == ()
    assert selection.basis is Basis.FALLBACK
    assert "no candidate was evaluated" in selection.fallback_reasons[-1][1]


def test_a_family_that_breaks_its_contract_is_switched_off(worker: Worker):
    made = context(worker)
    family = made.catalog.template_families[FAMILY]
    family.lower = lambda match, schedule, target: evolve(doubles.fake_source("honest"), launches=())  # type: ignore[method-assign]
    assert lower.run((plan(step("honest"), step("wrong")),), made) == ()
    assert [f.cause for f in made.failures] == [Cause.CONTRACT]
    assert "no launch" in made.failures[0].message


def test_no_kernel_is_lowered_again_to_be_selected(ctx, monkeypatch: pytest.MonkeyPatch):
    made, _ = ctx
    ordered = (plan(step("honest", 4.0)),)
    found = validate.run(lower.run(ordered, made), ordered, 60.0, made)
    monkeypatch.setattr(made.catalog.template_families[FAMILY], "lower", None)
    (selection,) = select.run((ordered[0].plan,), found, made).selections
    assert selection.steps[0].source is not None and selection.steps[0].source.digest in found.kernels
