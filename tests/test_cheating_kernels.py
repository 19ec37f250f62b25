"""A kernel that is fast because it does not do its work, or that does harm later, is refused once it was timed."""

import pytest
from attrs import evolve

from agentcompile_core.errors import Cause
from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.ir.record import Measurement
from agentcompile_core.ir.region import Role
from agentcompile_core.ir.verdict import Case, InputFamily, Outcome
from agentcompile_core.testing import doubles
from agentcompile_core.worker import after_timing, evaluate
from agentcompile_core.worker.evaluate import WorkerState
from agentcompile_core.worker.protocol import Evaluation, Job


def evaluated(behaviour: str, us: float = 5.0, backend: str = "fake", **changes: object) -> Evaluation:
    """What a fresh child finds out about one fake kernel, in this process."""
    step = Step(match_id="elementwise:add+1:add", implementation="doubles/fake_family", origin=Origin.GENERATED,
                schedule=Schedule({"behave": behaviour}))
    trial = doubles.fake_trial(behaviour, us)
    job = Job(trial=evolve(trial, **changes), step=step, backend=backend, validators=("simple",), baseline=True)
    session = WorkerState(doubles.catalog())
    kernel = session.build(job)
    return session.evaluate(job, kernel, lambda phase: None)


@pytest.mark.parametrize(("behaviour", "cause", "message"), [
    ("stops", Cause.TOLERANCE, "stopped doing its work"),
    ("lazy", Cause.TOLERANCE, "does not look at its inputs again"),
    ("caches", Cause.TOLERANCE, "does not look at its inputs again"),
    ("input_later", Cause.MEMORY_FAULT, "after it was timed: changed: in0"),
    ("outside_later", Cause.MEMORY_FAULT, "after it was timed: wrote outside: out"),
])
@pytest.mark.parametrize("cases", [1, 2])
def test_a_kernel_that_cheats_the_clock_is_refused_with_the_reason(behaviour: str, cause: Cause, message: str, cases: int) -> None:
    given = doubles.fake_trial(behaviour).cases[:cases]
    found = evaluated(behaviour, cases=given)
    assert found.verdicts[0].passed, "the validator alone does not see it"
    assert (found.failure, found.measurement) == (cause, None) and message in found.message


@pytest.mark.parametrize("cases", [1, 2])
@pytest.mark.parametrize(("behaviour", "message"), [("lazy", "does not look at its inputs again"),
                                                    ("caches", "does not look at its inputs again")])
def test_a_kernel_that_cannot_be_timed_is_run_again_at_the_same_addresses(behaviour: str, message: str, cases: int) -> None:
    given = doubles.fake_trial(behaviour).cases[:cases]
    found = evaluated(behaviour, backend="no_time", cases=given)
    assert found.verdicts[0].outcome is Outcome.PASS, "the validator alone does not see it"
    assert found.failure is Cause.TOLERANCE and message in found.message


@pytest.mark.parametrize(("behaviour", "cause", "message"), [
    ("lies", Cause.TOLERANCE, "stopped doing its work: run 41 at the same addresses, on poisoned outputs"),
    ("stops", Cause.TOLERANCE, "stopped doing its work: run 41 at the same addresses, on poisoned outputs"),
    ("input_later", Cause.MEMORY_FAULT, "after 41 runs at the same addresses: changed: in0"),
    ("outside_later", Cause.MEMORY_FAULT, "after 41 runs at the same addresses: wrote outside: out"),
])
def test_and_as_often_as_its_validation_leaves_time_for(behaviour: str, cause: Cause, message: str,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "UNTIMED_SHARE", 1e9)
    found = evaluated(behaviour, backend="no_time")
    assert (found.failure, found.measurement) == (cause, None) and message in found.message


@pytest.mark.parametrize("share", [0.0, 1e9])
def test_what_holds_there_is_provisional(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "UNTIMED_SHARE", share)
    found = evaluated("honest", backend="no_time")
    assert found.failure is None and found.verdicts[0].outcome is Outcome.PROVISIONAL


def test_an_honest_kernel_passes_and_its_baseline_is_timed_on_the_inputs_of_the_case() -> None:
    found = evaluated("honest")
    assert found.failure is None and found.measurement is not None and found.baseline is not None


@pytest.mark.parametrize("us, warm, cold", [(8.0, False, False), (0.95 * 8.0, False, False), (5.0, False, True), (0.2, True, True)])
def test_no_time_is_below_the_floor_whether_caches_are_cold_or_warm(us: float, warm: bool, cold: bool) -> None:
    measured = Measurement(us=us, spread_us=0.1, repetitions=25, floor_us=8.0)
    assert bool(after_timing.impossible(measured, cold=False)) is warm
    assert bool(after_timing.impossible(measured, cold=True)) is cold


def test_a_warm_time_that_no_cache_allows_is_refused() -> None:
    found = evaluated("too_fast")  # 400 bytes stay in any L2
    assert found.failure is Cause.CONTRACT and "even from a cache: a bug, not a record" in found.message


def test_a_cold_time_that_the_memory_does_not_allow_is_refused() -> None:
    trial = doubles.fake_trial("honest")
    operands = tuple(evolve(o, role=Role.WEIGHT) if o.role is Role.INPUT else o for o in trial.match.operands)
    slow = evolve(trial.target, l2_bytes=400, memory_gbps=0.2)  # 1200 bytes need 6 us
    found = evaluated("honest", 5.0, match=evolve(trial.match, operands=operands), target=slow)
    assert found.failure is Cause.CONTRACT and "faster than the 6 us that its bytes need: a bug" in found.message


def test_other_inputs_are_those_of_another_case_where_there_is_one() -> None:
    first, second = Case(family=InputFamily.NORMAL, seed=1, position=3), Case(family=InputFamily.INTEGERS, seed=2, position=9)
    assert after_timing.other_case((first, second)) == second
    alone = after_timing.other_case((first,))
    assert alone.seed != first.seed and (alone.family, alone.position) == (first.family, first.position)
