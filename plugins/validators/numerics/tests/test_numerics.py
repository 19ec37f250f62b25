"""The validator finds every planted defect, names it, and lets correct results pass."""

import ctypes

import pytest
from agentcompile_validator_numerics import NumericsValidator, agentcompile_validators
from agentcompile_validator_numerics.controls import trials_for
from attrs import evolve

from agentcompile_core.plugin_api import CONTROL_DEFECTS, Case, Cause, Origin, Outcome, Schedule, Step, control_source
from agentcompile_core.testing import doubles
from agentcompile_core.worker import Job
from agentcompile_core.worker.evaluate import WorkerState
from agentcompile_core.worker.execution import Execution, Oracles


class ControlBackend(doubles.FakeBackend):
    """Runs the control kernel in Python: the same arithmetic and the same defects."""

    def control(self, defect):
        return control_source("the text of the control", defect, language="cuda")

    def prepare_launch(self, handle, launch, arguments, pdl):
        if "control_kernel" not in launch.entry:
            return super().prepare_launch(handle, launch, arguments, pdl)
        a, b, out = ((ctypes.c_float * (arguments[4] + 1)).from_address(address) for address in arguments[:3])
        scratch = (ctypes.c_int * 16).from_address(arguments[3])
        count, defect = arguments[4:]

        def run(stream: int) -> None:
            total = [a[i] + b[i] for i in range(count)]
            if defect == 1:
                total[200] *= 1.001
            if defect == 6:
                total[7] += out[7] * 0.0
            for i in range(count - (defect == 2)):
                out[i] = total[i]
            if defect == 3:
                out[count] = 1.0
            if defect == 4:
                a[5] = total[5]
            if defect == 5:
                scratch[0] = 1

        return run


EXPECTED = {
    "wrong value": (Cause.TOLERANCE, "element 200"),
    "unwritten element": (Cause.TOLERANCE, "element 332 is nan"),
    "write behind the end": (Cause.MEMORY_FAULT, "wrote outside: out"),
    "input changed": (Cause.MEMORY_FAULT, "changed: in0"),
    "workspace left dirty": (Cause.MEMORY_FAULT, "workspace not zero again: scratch"),
    "garbage kept": (Cause.TOLERANCE, "element 7 is nan"),
}


def judge(trial):
    backend = ControlBackend()
    return NumericsValidator().check(trial, Execution(trial, backend, backend.load(backend.build(trial.source, trial.target))))


def test_the_good_control_passes_with_its_errors_on_record():
    (good,), _ = trials_for(ControlBackend())
    verdict = judge(good)
    assert verdict.outcome is Outcome.PASS
    assert [c.name.split()[0] for c in verdict.checks] == ["normal", "integers"]
    assert 0.0 < verdict.checks[0].max_abs < 1e-6
    assert 0.0 < verdict.checks[0].budget_use <= 1.0
    assert verdict.checks[1].max_abs == 0.0


@pytest.mark.parametrize("index", range(len(CONTROL_DEFECTS)), ids=CONTROL_DEFECTS)
def test_each_planted_defect_is_refused_for_its_own_reason(index: int):
    _, bad = trials_for(ControlBackend())
    verdict = judge(bad[index])
    cause, message = EXPECTED[CONTROL_DEFECTS[index]]
    assert verdict.outcome is Outcome.FAIL
    assert verdict.cause is cause
    assert message in verdict.message


def test_results_that_depend_on_the_run_are_refused():
    class Restless(ControlBackend):
        calls = 0

        def prepare_launch(self, handle, launch, arguments, pdl):
            run = super().prepare_launch(handle, launch, arguments, pdl)
            out = (ctypes.c_float * 4).from_address(arguments[2])

            def restless(stream: int) -> None:
                run(stream)
                self.calls += 1
                out[3] = ctypes.c_float(out[3] * (1.0 + 1.2e-7 * (self.calls == 2))).value

            return restless

    (good,), _ = trials_for(ControlBackend())
    trial = evolve(good, cases=good.cases[:1])
    backend = Restless()
    verdict = NumericsValidator().check(trial, Execution(trial, backend, backend.load(backend.build(trial.source, trial.target))))
    assert verdict.outcome is Outcome.FAIL
    assert "two runs on the same data differ" in verdict.message


def test_a_trial_without_cases_does_not_pass():
    (good,), _ = trials_for(ControlBackend())
    assert judge(evolve(good, cases=())).outcome is Outcome.FAIL


def test_in_a_session_the_controls_come_first():
    catalog = doubles.catalog()
    catalog.offers["agentcompile_backends"]["doubles/fake"] = backend = ControlBackend()
    catalog.offers["agentcompile_validators"]["numerics/numerics"] = next(iter(agentcompile_validators()))
    session, phases = WorkerState(catalog), []
    step = Step(match_id="m", implementation="doubles/fake_family", origin=Origin.GENERATED, schedule=Schedule({}))
    job = Job(trial=doubles.fake_trial("honest"), step=step, backend="fake", validators=("numerics",))
    first = session.evaluate(job, session.build(job), phases.append)
    assert first.failure is None
    assert first.measurement is not None
    assert backend.builds == 2  # the candidate, and one build for all controls
    assert phases == ["controls of numerics", "check by numerics", "time"]
    assert backend.time is not None
    second = session.evaluate(evolve(job, trial=doubles.fake_trial("wrong")), backend.build(doubles.fake_source("wrong"), job.trial.target),
                              phases.append)
    assert second.failure is Cause.TOLERANCE
    assert second.measurement is None


def test_the_reference_made_beside_a_run_sees_nothing_that_the_run_writes():
    """It is begun while the kernel runs, and shared by all candidates of a match: one that changes its inputs must not spoil it."""
    (good,), bad = trials_for(ControlBackend())
    shared = Oracles()
    for trial in (bad[CONTROL_DEFECTS.index("input changed")], good):
        backend, case = ControlBackend(), trial.cases[0]
        execution = Execution(trial, backend, backend.load(backend.build(trial.source, trial.target)), oracles=shared)
        result = execution.run(case, float("nan"))
        given = execution.inputs(case, "cpu")
        expected = execution.expected(case, result.inputs)["sum"]
        assert bool((expected.value == given["in0"].double() + given["in1"].double()).all())


def test_a_reference_that_raises_does_so_to_whoever_asks_for_it(monkeypatch: pytest.MonkeyPatch):
    def none(*_):
        raise ArithmeticError("no reference today")

    monkeypatch.setattr(Execution, "_reference", none)
    (good,), _ = trials_for(ControlBackend())
    backend = ControlBackend()
    execution = Execution(good, backend, backend.load(backend.build(good.source, good.target)))
    result = execution.run(good.cases[0], float("nan"))
    assert execution.fault is None
    with pytest.raises(ArithmeticError, match="no reference today"):
        execution.expected(good.cases[0], result.inputs)
    assert isinstance(execution.fault, ArithmeticError)


@pytest.mark.parametrize("carrier", ["in0", "in1"])
def test_a_nan_that_one_operand_carries_takes_one_run_which_shows_that_it_was_written(carrier: str):
    class Skips(ControlBackend):
        runs, skips = 0, False

        def prepare_launch(self, handle, launch, arguments, pdl):
            run = super().prepare_launch(handle, launch, arguments, pdl)
            out = (ctypes.c_float * arguments[4]).from_address(arguments[2])

            def skipping(stream: int) -> None:
                before = list(out)
                run(stream)
                self.runs += 1
                for i, value in enumerate(out):
                    if self.skips and value != value:
                        out[i] = before[i]

            return skipping

    (good,), _ = trials_for(ControlBackend())
    trial, backend = evolve(good, cases=(Case(family="nan", seed=1, carrier=carrier),)), Skips()
    handle = backend.load(backend.build(trial.source, trial.target))
    verdict = NumericsValidator().check(trial, Execution(trial, backend, handle))
    assert (verdict.outcome, backend.runs) == (Outcome.PASS, 1) and verdict.checks[0].name == f"nan seed 1 position 0 of {carrier}"
    backend.skips = True
    verdict = NumericsValidator().check(trial, Execution(trial, backend, handle))
    assert verdict.outcome is Outcome.FAIL and "is 777, reference nan" in verdict.message
