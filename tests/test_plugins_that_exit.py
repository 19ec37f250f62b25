"""A plugin that ends the process, or raises what no caller expects, costs its own part: wherever the core calls it."""

from types import SimpleNamespace
from typing import Any

import pytest
import select_cases
from attrs import asdict, evolve

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import Cause, StageName
from agentcompile_core.installation import building
from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.ir.record import Measurement
from agentcompile_core.ir.search_log import Reason
from agentcompile_core.plugin.match_kind import MatchKind
from agentcompile_core.stages import lower, validate
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles
from agentcompile_core.testing.targets import FAKE
from agentcompile_core.worker.evaluate import WorkerState
from agentcompile_core.worker.evaluate import prepare as prepare_child
from agentcompile_core.worker.protocol import Job

ERRORS = [SystemExit(0), SystemExit("no licence"), RuntimeError("sad")]


class Exiting(doubles.FakeFamily):
    """Raises for wrong kernels, lowers the others."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def lower(self, match: Any, schedule: Any, target: Any) -> Any:
        if schedule["behave"] == "wrong":
            raise self.error
        return super().lower(match, schedule, target)


class ExitingBackend(doubles.FakeBackend):
    """Raises where it is told to."""

    name = "exiting"

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where, self.error = where, error

    def _maybe(self, where: str) -> None:
        if where == self.where:
            raise self.error

    def prepare(self) -> None:
        self._maybe("prepare")

    def build(self, source: Any, target: Any, deadline_s: float = 1.0) -> Any:
        self._maybe("build")
        return super().build(source, target)

    def load(self, kernel: Any) -> Any:
        self._maybe("load")
        return super().load(kernel)

    def prepare_launch(self, handle: Any, launch: Any, arguments: Any, pdl: bool) -> Any:
        self._maybe("launch")
        return super().prepare_launch(handle, launch, arguments, pdl)


def context(**offers: Any) -> Context:
    catalog = doubles.catalog()
    for hook, offer in offers.items():
        catalog.offers[f"agentcompile_{hook}"][f"doubles/{offer.name}"] = offer
    return Context(catalog=evolve(catalog, strict=False), target=FAKE, config=Config(), store=Store(None))


def step(behaviour: str) -> Step:
    return Step(match_id=doubles.fake_match()[0].id, implementation="doubles/fake_family", origin=Origin.GENERATED,
                schedule=Schedule({"behave": behaviour, "us": 5.0}))


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_family_that_raises_as_it_lowers_costs_that_step(error: BaseException) -> None:
    ctx, match = context(template_families=Exiting(error)), doubles.fake_match()[0]
    region: Any = SimpleNamespace(match_by_id={match.id: match})
    ordered: Any = SimpleNamespace(signature="s", steps=(step("wrong"), step("honest")), plan=SimpleNamespace(region=region))
    found = lower.run((ordered,), ctx)
    assert [candidate.step.schedule["behave"] for candidate in found] == ["honest"]
    (failure,) = ctx.failures
    assert (failure.stage, failure.cause, failure.plugin) == (StageName.LOWER, Cause.EXCEPTION, "doubles/fake_family")
    assert failure.message == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_backend_that_raises_as_it_builds_costs_the_kernel(error: BaseException) -> None:
    ctx = context()
    assert building.build_one(doubles.fake_source("honest"), ExitingBackend("build", error), ctx) is None
    (failure,) = ctx.failures
    assert (failure.cause, failure.plugin, failure.message) == (Cause.EXCEPTION, "exiting", f"build: {type(error).__name__}: {error}")


@pytest.mark.parametrize("where", ["build", "load", "launch", "prepare", ""])
@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_backend_that_raises_in_the_child_costs_the_candidate(error: BaseException, where: str) -> None:
    session = WorkerState(context(backends=ExitingBackend(where, error)).catalog)
    prepare_child({"target": _document(), "backend": "exiting", "validators": ["simple"]}, session, lambda phase: None)
    job = Job(trial=doubles.fake_trial("honest"), step=step("honest"), backend="exiting", validators=("simple",))
    kernel = session.build(job)
    found = kernel if where == "build" else session.evaluate(job, kernel, lambda phase: None)  # type: ignore[arg-type]
    if where in ("prepare", ""):
        assert isinstance(found.measurement, Measurement)  # type: ignore[union-attr]
    else:
        assert found.failure in (Cause.EXCEPTION, Cause.UNAVAILABLE) and type(error).__name__ in found.message  # type: ignore[union-attr]


def _document() -> Any:
    from agentcompile_core.ir import serial

    return serial.unstructure(FAKE)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_kind_that_raises_as_cases_are_made_costs_its_matches(error: BaseException) -> None:
    class Sad(MatchKind):
        def positions(self, match: Any, emulated: bool) -> Any:
            raise error

    rule = doubles.FakeRule()
    rule.kinds = (Sad(**asdict(doubles.FAKE_KIND, recurse=False)),)  # type: ignore[misc]
    ctx = select_cases.context()
    ctx.catalog.offers["agentcompile_region_rules"]["doubles/fake_rule"] = rule
    ctx = evolve(ctx, catalog=evolve(ctx.catalog, strict=False))
    ordered = (select_cases.plan(select_cases.step("honest"), select_cases.step("wrong")),)
    queue = validate.Queue(ordered, ctx.backend, ctx)  # type: ignore[arg-type]
    assert queue.entries(lower.run(ordered, ctx)) == [] and {one.reason for one in queue.untried} == {Reason.NO_JUDGE}
    (failure,) = ctx.failures
    assert (failure.plugin, failure.count, failure.message) == ("match kind elementwise", 2, f"{type(error).__name__}: {error}")
