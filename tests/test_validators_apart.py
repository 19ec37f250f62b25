"""What one validator changes of what it was given reaches no other one, and no other candidate: a wrong kernel stays refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from agentcompile_core.errors import Cause
from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.ir.verdict import Outcome, Trial, Verdict
from agentcompile_core.ops.reference import Bounded
from agentcompile_core.plugin.interfaces import Backend, TrialRun
from agentcompile_core.testing import doubles
from agentcompile_core.testing.validator_conformance import ValidatorConformance
from agentcompile_core.worker import execution
from agentcompile_core.worker.evaluate import WorkerState
from agentcompile_core.worker.given import _clone
from agentcompile_core.worker.protocol import Evaluation, Job


def to_what_came_out(run: Any, case: Any) -> None:
    result = run.run(case, 0.0)
    expected = run.expected(case, result.inputs)
    for name, tensor in run.values(result.outputs).items():
        expected[name].value.copy_(tensor)


def to_any_error(run: Any, case: Any) -> None:
    for bound in run.expected(case, run.run(case, 0.0).inputs).values():
        bound.error.fill_(float("inf"))


def by_name(run: Any, case: Any) -> None:
    result = run.run(case, 0.0)
    expected = run.expected(case, result.inputs)
    for name, tensor in run.values(result.outputs).items():
        expected[name] = Bounded(tensor.double(), torch.full(tensor.shape, float("inf"), dtype=torch.float64))


def inputs_before_the_reference(run: Any, case: Any) -> None:
    result = run.run(case, 0.0)
    for tensor in result.inputs.values():
        tensor.zero_()
    run.expected(case, result.inputs)


def inputs_unseen_by_torch(run: Any, case: Any) -> None:
    result = run.run(case, 0.0)
    for tensor in result.inputs.values():
        tensor.numpy()[:] = 0.0
    run.expected(case, result.inputs)


def other_inputs(run: Any, case: Any) -> None:
    run.expected(case, {name: torch.zeros_like(tensor) for name, tensor in run.run(case, 0.0).inputs.items()})


def inputs_of_its_own(run: Any, case: Any) -> None:
    inputs = run.inputs(case, "cpu")
    for tensor in inputs.values():
        tensor.zero_()
    run.expected(case, inputs)


def how_it_runs(run: Any, case: Any) -> None:
    vars(run).pop("run", None)
    right = run.expected(case, run.run(case, 0.0).inputs)
    run.values = lambda outputs: {name: bound.value.float() for name, bound in right.items()}
    run.run = lambda case, poison: None


HOW = (to_what_came_out, to_any_error, by_name, inputs_before_the_reference, inputs_unseen_by_torch, other_inputs, inputs_of_its_own,
       how_it_runs)


class Meddling(doubles.SimpleValidator):
    """Passes all but its own control, and changes what it is given."""

    name = "meddling"

    def __init__(self, how: Callable[[Any, Any], None]) -> None:
        self.how = how

    def controls(self, backend: Backend) -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
        return (doubles.fake_trial("honest"),), (doubles.fake_trial("nans"),)

    def check(self, trial: Trial, run: TrialRun) -> Verdict:
        if "behave=nans" in trial.source.code:
            return Verdict(validator=self.name, outcome=Outcome.FAIL, cause=Cause.TOLERANCE, message="its own control")
        for case in trial.cases:
            self.how(run, case)
        return Verdict(validator=self.name, outcome=Outcome.PASS)


def evaluated(how: Callable[[Any, Any], None], *behaviours: str) -> list[Evaluation]:
    """Of several candidates of one match in one child, judged by the meddler first."""
    catalog = doubles.catalog()
    catalog.offers["agentcompile_validators"]["bad/meddling"] = Meddling(how)
    step = Step(match_id="elementwise:add+1:add", implementation="doubles/fake_family", origin=Origin.GENERATED, schedule=Schedule({}))
    session = WorkerState(catalog)
    jobs = [Job(trial=doubles.fake_trial(one), step=step, backend="fake", validators=("meddling", "simple"), time=False)
            for one in behaviours]
    return [session.evaluate(job, session.build(job), lambda phase: None) for job in jobs]


@pytest.mark.parametrize("host", ["cpu", "elsewhere"])
@pytest.mark.parametrize("how", HOW, ids=lambda how: how.__name__)
def test_a_wrong_kernel_is_refused_and_a_right_one_passes_whatever_another_validator_changes(
        how: Callable[[Any, Any], None], host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "HOST", host)  # elsewhere: references are made when they are asked for, of what was handed out
    for behaviours in (("wrong", "honest", "wrong"), ("honest", "wrong", "honest")):
        found = evaluated(how, *behaviours)
        assert [one.failure for one in found] == [None if b == "honest" else Cause.TOLERANCE for b in behaviours], found
        assert [one.verdicts[-1].validator for one in found] == ["simple"] * 3


@pytest.mark.parametrize("how", [to_what_came_out, to_any_error, by_name, inputs_unseen_by_torch], ids=lambda how: how.__name__)
def test_the_kit_sees_it(how: Callable[[Any, Any], None]) -> None:
    kit = type("Kit", (ValidatorConformance,), {"validator": Meddling(how), "bad": (doubles.fake_trial("wrong"),)})()
    with pytest.raises(AssertionError, match=r"check\(\) changed (reference|input)"):
        kit.test_what_it_is_given_is_left_as_it_was()


def test_a_copy_of_a_reference_repeats_what_it_repeats() -> None:
    once = torch.zeros((), dtype=torch.float64).expand(4, 3)
    for tensor in (once, torch.arange(12.0).view(4, 3), torch.arange(3.0).expand(4, 3), torch.ones(()), torch.ones(0, 2)):
        copied = _clone(tensor)
        assert torch.equal(copied, tensor) and (copied.numel() == 0 or copied.data_ptr() != tensor.data_ptr())
    assert _clone(once).untyped_storage().nbytes() == 8
