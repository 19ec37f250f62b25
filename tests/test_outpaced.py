"""A candidate that is far slower than a rival is not judged to the end, and what it lost to is remembered rightly."""

from pathlib import Path

import pytest
import select_cases
from attrs import evolve
from inline_worker import Here

from agentcompile_core.errors import Cause
from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.ir.verdict import Case, InputFamily
from agentcompile_core.report import candidates_document
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles
from agentcompile_core.worker.evaluate import FIRST_CASES, OUTPACED, WorkerState
from agentcompile_core.worker.protocol import Evaluation, Job

CASES = tuple(Case(family=InputFamily.NORMAL, seed=seed) for seed in range(FIRST_CASES + 4))


def evaluated(us: float, behaviour: str = "honest", **job: object) -> Evaluation:
    """What a fresh child finds out about one fake kernel that takes ``us``."""
    session = WorkerState(doubles.catalog())
    step = Step(match_id="elementwise:add+1:add", implementation="doubles/fake_family", origin=Origin.GENERATED,
                schedule=Schedule({"behave": behaviour}))
    trial = evolve(doubles.fake_trial(behaviour, us), cases=CASES)
    asked = Job(trial=trial, step=step, backend="fake", validators=("simple",), **job)  # type: ignore[arg-type]
    return session.evaluate(asked, session.build(asked), lambda phase: None)


def test_one_that_is_far_slower_than_a_rival_is_outpaced() -> None:
    slow = evaluated(5.0 * OUTPACED * 1.1, good_enough_us=5.0)
    assert (slow.failure, slow.verdicts) == (Cause.OUTPACED, ()) and slow.measurement is not None
    assert "us against 5.00 us of a rival" in slow.message and f"{FIRST_CASES} of {len(CASES)} cases" in slow.message


@pytest.mark.parametrize(("us", "best_us"), [(5.0, 0.0), (5.0 * OUTPACED * 0.9, 5.0), (3.0, 5.0)])
def test_one_that_may_win_is_judged_in_full(us: float, best_us: float) -> None:
    found = evaluated(us, good_enough_us=best_us)
    assert found.failure is None and len(found.verdicts[0].checks) == len(CASES)


@pytest.mark.parametrize("behaviour", ["wrong", "unwritten", "nan_time"])
def test_a_bad_kernel_is_refused_as_bad_however_slow_it_is(behaviour: str) -> None:
    assert evaluated(50.0, behaviour, good_enough_us=5.0).failure not in (None, Cause.OUTPACED)


def test_a_baseline_that_was_asked_for_comes_with_an_outpaced_candidate() -> None:
    found = evaluated(20.0, good_enough_us=5.0, baseline=True)
    assert found.failure is Cause.OUTPACED and found.baseline is not None


def validated(store: Store, *times_us: float) -> dict[float, str]:
    """What stage validate says of honest kernels that take ``times_us``: "passed" or the class of their failure."""
    catalog = doubles.catalog()
    ctx = evolve(select_cases.context(Here(catalog)), store=store)
    records = select_cases.validated(ctx, (select_cases.plan(*(select_cases.step("honest", us) for us in times_us)),))
    honest = [r for r in records if r.step.implementation == select_cases.FAMILY]
    assert [c["outpaced"] for c in candidates_document(honest)] == [sum(r.failure is Cause.OUTPACED for r in honest)]
    return {float(r.step.schedule["us"]): r.failure.value if r.failure else "passed" for r in honest}


@pytest.mark.parametrize("left", [(20.0,), (20.0, 21.0)])
def test_a_record_of_one_that_was_outpaced_holds_only_beside_its_rival(left: tuple[float, ...], tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    assert validated(store, 5.0, *left) == {5.0: "passed", **dict.fromkeys(left, "outpaced")}
    assert validated(store, 5.0, *left) == {5.0: "passed", **dict.fromkeys(left, "outpaced")}, "from the store"
    assert validated(store, *left) == dict.fromkeys(left, "passed"), "the rival takes no part any more"
