"""Several children at a time: what one job does costs no other, results come as they are done, rivals wait for each other."""

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.errors import Cause
from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.testing import doubles
from agentcompile_core.worker import Evaluation, Job, Worker, side_by_side

CATALOG = "agentcompile_core.testing.doubles:catalog"


def job(behaviour: str) -> Job:
    step = Step(match_id="elementwise:add+1:add", implementation="doubles/fake_family", origin=Origin.GENERATED,
                schedule=Schedule({"behave": behaviour}))
    return Job(trial=doubles.fake_trial(behaviour), step=step, backend="fake", validators=("simple",))


@pytest.fixture(autouse=True)
def two_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "most_children", lambda: 2)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(catalog=CATALOG, deadlines_s={"check": 3.0, "time": 3.0}, builders=1) as made:
        yield made


def test_a_job_that_hangs_or_crashes_costs_itself_and_lets_others_pass(worker: Worker):
    names = ["hang", "honest", "honest", "segfault", "honest", "wrong", "honest"]
    found = list(worker.evaluate_beside(iter([job(name) for name in names])))
    causes = {index: evaluation.failure for index, evaluation in found}
    assert [causes[i] for i in range(len(names))] == [Cause.TIMEOUT, None, None, Cause.MEMORY_FAULT, None, Cause.TOLERANCE, None]
    order = [index for index, _ in found]
    assert order.index(2) < order.index(0), "a second child takes what the hanging one does not get to"


def test_who_stops_early_leaves_nothing_running_and_the_worker_goes_on(worker: Worker):
    began = time.monotonic()
    for index, _ in worker.evaluate_beside(iter([job("honest"), job("hang"), job("hang"), job("honest")])):
        assert index == 0
        break
    assert time.monotonic() - began < 5.0
    assert not [t for t in threading.enumerate() if t.name == "lane"]
    ((_, after),) = worker.evaluate([job("honest")])
    assert after.failure is None


def test_no_result_is_waited_for_after_the_end(worker: Worker):
    began = time.monotonic()
    found = list(worker.evaluate_beside(iter([job("hang"), job("honest")]), stop_at=time.monotonic() + 1.5))
    assert found == [] and time.monotonic() - began < 5.0


def test_a_worker_that_does_not_start_fails_every_job_and_ends():
    with Worker(catalog="agentcompile_core.testing.doubles:no_such_thing", builders=1) as broken:
        found = dict(broken.evaluate_beside(iter([job("honest") for _ in range(3)])))
    assert sorted(found) == [0, 1, 2]
    assert all(e.failure is Cause.UNAVAILABLE and "does not start" in e.message for e in found.values())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_rivals_wait_for_each_other_and_nothing_is_lost(groups: list[int]):
    """Where a job has to wait for the answer to another one, both are answered, once."""
    left, given_out, answered = list(range(len(groups))), [], set()

    def jobs() -> Iterator[Job | None]:
        while left:
            busy = {groups[i] for i in given_out if i not in answered}
            free = next((i for i in left if groups[i] not in busy), None)
            if free is not None:
                left.remove(free)
                given_out.append(free)
            yield job("honest") if free is not None else None

    def lane(index: int) -> side_by_side.Evaluating:
        def evaluate(inbox: Iterator[Job | None], progress: object) -> Iterator[tuple[int, Evaluation]]:
            number = 0
            for one in inbox:
                if one is not None:
                    yield number, Evaluation()
                    number += 1

        return evaluate

    for position, _ in side_by_side.side_by_side(lane, lambda index: None, jobs(), None, lambda index, phase: None):
        assert given_out[position] not in answered
        answered.add(given_out[position])
    assert sorted(answered) == list(range(len(groups)))
