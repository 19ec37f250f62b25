"""The worker survives what candidates do, and refuses wrong ones for the stated reason."""

import os
import time

import pytest
from agentcompile_cuda_kit.targets import PRESETS

from agentcompile_core.errors import Cause
from agentcompile_core.ir import serial
from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.ir.verdict import Outcome
from agentcompile_core.processes.environment import child_environment
from agentcompile_core.testing import doubles
from agentcompile_core.worker import Evaluation, Job, Worker, WorkerLost

CATALOG = "agentcompile_core.testing.doubles:catalog"


def job(behaviour: str, **changes: object) -> Job:
    step = Step(match_id="elementwise:add+1:add", implementation="doubles/fake_family", origin=Origin.GENERATED,
                schedule=Schedule({"behave": behaviour}))
    return Job(**{"trial": doubles.fake_trial(behaviour), "step": step, "backend": "fake", "validators": ("simple",), **changes})


@pytest.fixture(scope="module")
def worker():
    with Worker(catalog=CATALOG, deadlines_s={"check": 4.0, "time": 4.0}, builders=2) as made:
        yield made


def evaluate(worker: Worker, *jobs: Job) -> list:
    return [evaluation for _, evaluation in worker.evaluate(jobs)]


def test_a_crash_a_hang_and_a_fault_cost_the_candidate_only(worker: Worker):
    before = worker.restarts
    names = ("honest", "abort", "honest", "hang", "segfault", "exit", "honest")
    found = evaluate(worker, *(job(name) for name in names))
    causes = [e.failure for e in found]
    assert causes == [None, Cause.CRASH, None, Cause.TIMEOUT, Cause.MEMORY_FAULT, Cause.CRASH, None]
    assert [e.measurement is not None for e in found] == [True, False, True, False, False, False, True]
    assert worker.restarts == before + 4
    assert "SIGABRT" in found[1].message
    assert "4 s" in found[3].message
    assert "code 7" in found[5].message


@pytest.mark.parametrize("backend", ["", "fake", "no such backend"])
def test_a_worker_that_was_started_ahead_serves(backend: str):
    with Worker(catalog=CATALOG, builders=1) as made:
        made.start(backend)
        (found,) = evaluate(made, job("honest"))
    assert found.failure is None and made.restarts == 0


def test_preparing_hides_nothing_and_ends_nothing():
    """A validator that raises over its controls, and one that nobody knows, are named by the candidates that need them."""
    with Worker(catalog="agentcompile_core.testing.bad_validators:catalog", builders=1) as made:
        made.prepare("fake", PRESETS["h200"], ("uncontrolled", "no such validator"))
        made.prepare("no such backend", PRESETS["h200"], ("simple",))
        broken, good = evaluate(made, job("honest", validators=("uncontrolled",)), job("honest"))
    assert "uncontrolled" in broken.message and broken.failure is Cause.UNAVAILABLE
    assert good.failure is None and made.restarts == 0


def test_a_caller_who_stops_at_a_crash_leaves_no_dead_child_to_the_next(worker: Worker):
    for _, evaluation in worker.evaluate([job("segfault")]):
        assert evaluation.failure is Cause.MEMORY_FAULT
        break
    (after,) = evaluate(worker, job("honest"))
    assert after.failure is None


@pytest.mark.parametrize(("behaviour", "cause", "message"), [
    ("wrong", Cause.TOLERANCE, "beyond the budget"),
    ("unwritten", Cause.TOLERANCE, "nan"),
    ("outside", Cause.TOLERANCE, "wrote outside: out"),
    ("input", Cause.TOLERANCE, "changed: in0"),
    ("lies", Cause.TOLERANCE, "output that was timed is wrong"),
    ("raises", Cause.EXCEPTION, "told to fail"),
    ("no_build", Cause.COMPILE, "told to refuse"),
    ("nan_time", Cause.UNAVAILABLE, "impossible timings"),
])
def test_wrong_kernels_are_refused_for_the_stated_reason(worker: Worker, behaviour: str, cause: Cause, message: str):
    (found,) = evaluate(worker, job(behaviour))
    assert found.failure is cause
    assert message in found.message
    assert found.measurement is None


def test_faster_than_physics_is_a_bug(worker: Worker):
    from attrs import evolve

    from agentcompile_core.ir.region import Role
    trial = doubles.fake_trial("too_fast", count=1000)
    # As weights these operands count as cold data on a device with a tiny L2.
    operands = tuple(evolve(o, role=Role.WEIGHT) if o.role is Role.INPUT else o for o in trial.match.operands)
    trial = evolve(trial, match=evolve(trial.match, operands=operands), target=evolve(trial.target, l2_bytes=4000))
    (found,) = evaluate(worker, job("too_fast", trial=trial))
    assert found.failure is Cause.CONTRACT
    assert "a bug, not a record" in found.message


def test_a_pass_is_timed_beside_the_framework_and_returns_its_kernel(worker: Worker):
    (found,) = evaluate(worker, job("honest", baseline=True))
    assert found.failure is None
    assert found.verdicts[0].outcome is Outcome.PASS
    assert found.measurement.us == pytest.approx(5.0, rel=0.01)
    assert found.measurement.repetitions == 25
    assert found.measurement.floor_us > 0
    assert found.baseline.us == pytest.approx(doubles.FRAMEWORK_US, rel=0.01)
    assert found.kernel.binary == b"behave=honest us=5.0"


def test_output_of_plugins_is_not_taken_for_an_answer(worker: Worker):
    (found,) = evaluate(worker, job("prints"))
    assert found.failure is None


def test_without_a_clock_a_pass_is_provisional(worker: Worker):
    (found,) = evaluate(worker, job("honest", backend="no_time"))
    assert found.verdicts[0].outcome is Outcome.PROVISIONAL
    assert found.measurement is None
    assert "no time" in found.message


def test_a_validator_that_fails_its_controls_refuses_everything(worker: Worker):
    (found,) = evaluate(worker, job("honest", validators=("broken",)))
    assert found.failure is Cause.UNAVAILABLE
    assert "fails its own controls" in found.message


class Scripted:
    """Stands for a child: says what it is given, the greeting first."""

    ended, signal_number = False, 0

    def __init__(self, *answers: tuple[Evaluation, bool]) -> None:
        self.messages = [{"hello": 1}, *({"id": 0, "result": serial.unstructure(found), "lost": lost} for found, lost in answers)]

    def send(self, message: dict) -> None: ...

    def kill(self) -> None: ...

    def receive(self, seconds: float) -> dict:
        return self.messages.pop(0)


UNJUDGED = Evaluation(failure=Cause.UNAVAILABLE, message="validator numerics fails its own controls: AcceleratorError")
FAULTY, FINE = Evaluation(failure=Cause.MEMORY_FAULT, message="an illegal address"), Evaluation(message="fine")


@pytest.mark.parametrize(("answers", "wanted", "restarts"), [
    ([(UNJUDGED, True), (FINE, False)], FINE, 1),
    ([(UNJUDGED, True), (FAULTY, True)], FAULTY, 2),
    ([(UNJUDGED, True), (UNJUDGED, True)], UNJUDGED, 2),
    ([(UNJUDGED, False)], UNJUDGED, 0),
    ([(FAULTY, True)], FAULTY, 1),
])
def test_who_could_not_be_judged_on_a_lost_device_is_judged_once_more(
        monkeypatch: pytest.MonkeyPatch, answers: list[tuple[Evaluation, bool]], wanted: Evaluation, restarts: int):
    children = [Scripted(one) for one in answers]
    made = Worker(catalog=CATALOG, builders=1)
    monkeypatch.setattr(made, "_new_child", lambda: children.pop(0))
    (found,) = evaluate(made, job("honest"))
    assert (found.failure, found.message, made.restarts) == (wanted.failure, wanted.message, restarts) and not children


def test_no_validator_means_no_pass(worker: Worker):
    (found,) = evaluate(worker, job("honest", validators=()))
    assert found.failure is Cause.CONTRACT
    assert found.measurement is None


def test_a_kernel_that_is_given_is_not_built_again(worker: Worker):
    (first,) = evaluate(worker, job("honest"))
    (second,) = evaluate(worker, job("no_build", kernel=first.kernel, trial=doubles.fake_trial("no_build")))
    assert second.failure is None  # the binary that was given is honest


def test_the_budget_of_time_ends_the_evaluation(worker: Worker):
    began = time.monotonic()
    found = list(worker.evaluate([job("honest"), job("hang"), job("honest")], stop_at=began + 2.0))
    assert [index for index, _ in found] == [0]
    assert time.monotonic() - began < 4.0


def test_progress_names_the_phases(worker: Worker):
    seen: list[tuple[int, str]] = []
    list(worker.evaluate([job("honest")], progress=lambda index, phase: seen.append((index, phase))))
    assert [phase for _, phase in seen if not phase.startswith("controls")] == ["build", "load", "check by simple", "time"]


def test_a_worker_that_cannot_start_says_why():
    with Worker(catalog="agentcompile_core.testing.doubles:no_such_thing") as broken:
        (found,) = evaluate(broken, job("honest"))
    assert found.failure is Cause.UNAVAILABLE
    assert "no_such_thing" in found.message


def test_the_child_gets_no_keys(monkeypatch: pytest.MonkeyPatch, worker: Worker):
    monkeypatch.setenv("CANARY_API_KEY", "canary")
    monkeypatch.setenv("HF_HOME", "/somewhere")
    assert "PATH" in child_environment() and "HF_HOME" not in child_environment()
    worker.close()
    found = worker.call("agentcompile_core.testing.calls:environment", None, deadline_s=60.0)
    assert "CANARY_API_KEY" not in found
    assert "PATH" in found
    assert not set(found) - set(child_environment()) - {"LC_CTYPE"} - {n for n in found if n.startswith(("CUDA_", "KMP_", "TORCH"))}


def test_calls_reach_the_core_only_and_survive_the_callee(worker: Worker):
    assert worker.call("agentcompile_core.testing.calls:echo", {"a": [1]}, deadline_s=60.0) == {"a": [1]}
    with pytest.raises(WorkerLost, match="functions of agentcompile_core only"):
        worker.call("os:getcwd", None, deadline_s=10.0)
    with pytest.raises(WorkerLost, match="no progress within 1 s") as hung:
        worker.call("agentcompile_core.testing.calls:sleep", 60, deadline_s=1.0)
    assert hung.value.cause is Cause.TIMEOUT
    assert worker.call("agentcompile_core.testing.calls:echo", 5, deadline_s=60.0) == 5


def test_the_child_is_its_own_process_group_and_dies_with_close(worker: Worker):
    pid = worker.call("agentcompile_core.testing.calls:pid", None, deadline_s=60.0)
    assert os.getpgid(pid) == pid != os.getpgid(0)
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
