"""Published counts are those of the records: what was built, passed and selected, with the framework's baselines in none of them."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agentcompile_cuda_kit.targets import PRESETS
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import BuildError, Cause
from agentcompile_core.ir.advice import Advice, AdviceRecord, OrderedPlan
from agentcompile_core.ir.baseline import FRAMEWORK, baseline_step
from agentcompile_core.ir.evaluated import Evaluated
from agentcompile_core.ir.plan import Origin, Parameter, PlanSpace, RegionPlan, Schedule, ScheduleSpace, Step, StepSpace
from agentcompile_core.ir.record import TuningRecord
from agentcompile_core.ir.region import Instance, Region, RegionSummary
from agentcompile_core.ir.search_log import Seen, tried
from agentcompile_core.ir.verdict import Outcome, Verdict
from agentcompile_core.pipeline import Compilation, statistics
from agentcompile_core.plugin.interfaces import Implementation
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.stages import lower, validate
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from inline_worker import Here

ROOT = Path(__file__).parents[1]
MATCH = "elementwise:add+1:add"
FATES = {  # of a schedule: was there something to run, and did it pass
    "honest": (True, True), "wrong": (True, False), "outside": (True, False), "raises": (True, False), "lies": (True, False),
    "nan_time": (True, False),
    "no_build": (False, False), "shared": (False, False), "slow": (False, False), "registers": (False, False), "defect": (False, False),
    "callable": (True, True), "wrong_callable": (True, False), "unbound": (False, False),
}
SAID = {"shared": "ptxas: too much shared memory", "slow": "the compiler did not finish within 60 s", "registers": "too many registers"}


class Compiler(doubles.FakeBackend):
    """A compiler that can fail in every way that has a class of its own."""

    def build(self, source: Any, target: Any, deadline_s: float = 120.0) -> Any:
        """As told by the text."""
        for word, message in SAID.items():
            if f"behave={word} " in source.code:
                raise BuildError(message)
        if "behave=defect " in source.code:
            raise ZeroDivisionError("in the backend itself")
        return super().build(source, target, deadline_s)


class Adding(Implementation):
    """An implementation that adds, adds wrongly or cannot be bound."""

    name = "adding"
    origin = Origin.HANDWRITTEN

    def accepts(self, match: Any, target: Any) -> Any:
        """Everything."""
        return True

    def space(self, match: Any, target: Any) -> Any:
        """Not asked here."""
        raise AssertionError

    def bind(self, match: Any, schedule: Schedule, target: Any) -> Any:
        """As told by the schedule."""
        import torch

        if schedule["behave"] == "unbound":
            raise RuntimeError("its library is not here")
        by = 2.0 if schedule["behave"] == "wrong_callable" else 1.0
        return lambda in0, in1, out: torch.add(in0, in1, alpha=by, out=out)


def step(fate: str, n: int) -> Step:
    mine = "callable" in fate or fate == "unbound"
    return Step(match_id=MATCH, implementation="doubles/adding" if mine else "doubles/fake_family",
                origin=Origin.HANDWRITTEN if mine else Origin.GENERATED, schedule=Schedule({"behave": fate, "us": 5.0 + n}))


def planned(steps: tuple[Step, ...]) -> RegionPlan:
    match, graph = doubles.fake_match()
    instance = Instance(nodes=(("add", "add"),), values=())
    region = Region(name="addition", signature="s", graph=graph, instances=(instance,), matches=(match,))
    served = []
    for name in dict.fromkeys(s.implementation for s in steps):
        points = tuple(s.schedule for s in steps if s.implementation == name)
        parameters = tuple(Parameter(name=p, values=tuple(dict.fromkeys(point[p] for point in points))) for p in ("behave", "us"))
        origin = next(s.origin for s in steps if s.implementation == name)
        space = ScheduleSpace(parameters=parameters, points=points)
        served.append(StepSpace(match_id=MATCH, implementation=name, origin=origin, version=1, space=space))
    summary = RegionSummary(signature="s", label="mixed", operators=(), instances=1, matches=(), dominant="elementwise")
    return RegionPlan(region=region, summary=summary, space=PlanSpace(signature="s", covers=(), steps=tuple(served)))


def searched(fates: list[str]) -> tuple[RegionPlan, Evaluated, Seen]:
    catalog = doubles.catalog()
    catalog.backends["doubles/fake"] = Compiler()
    catalog.implementations["doubles/adding"] = Adding()
    ctx = Context(catalog=catalog, target=PRESETS["h200"], config=Config(validators=("simple",)), store=Store(None),
                  backend=catalog.backends["doubles/fake"], worker=Here(catalog))  # type: ignore[arg-type]
    steps = tuple(step(fate, n) for n, fate in enumerate(fates))
    plan, record = planned(steps), AdviceRecord(advisor="test", signature="s", round=0, accepted=Advice())
    plans = (OrderedPlan(plan=plan, steps=steps, ranks=tuple(range(len(steps))), record=record),)
    candidates = lower.run(plans, ctx)
    found = validate.run(candidates, plans, 60.0, ctx)
    seen = Seen(ordered=frozenset(("s", s) for s in steps), lowered=frozenset(("s", c.step) for c in candidates), untried=found.untried)
    return plan, found, seen


def compilation(plan: RegionPlan, found: Evaluated, seen: Seen) -> Compilation:
    return Compilation(graphs=SimpleNamespace(graphs=()), analyses=(), spaces=(plan.space,), advice=(), records=found.records,
                       selections=(), programs={}, kernels={}, lowered=len(seen.lowered), tried=tried([plan], found.records, seen))


@given(fates=st.lists(st.sampled_from(sorted(FATES)), min_size=1, max_size=8))
def test_counts_are_what_became_of_the_candidates(fates: list[str]) -> None:
    plan, found, seen = searched(fates)
    counts = statistics(compilation(plan, found, seen))
    assert counts["candidates"] == counts["lowered"] == counts["evaluated"] == len(fates)
    assert counts["built"] == sum(FATES[fate][0] for fate in fates)
    assert counts["validated"] == sum(FATES[fate][1] for fate in fates)
    assert counts["untried"] == 0
    baselines = [r for r in found.records if r.step.implementation == FRAMEWORK]
    assert len(baselines) == any(FATES[fate][1] for fate in fates), "the framework is timed beside what passes, and counted nowhere"


RECORDS = st.lists(st.builds(
    lambda built, passed, cause, baseline: TuningRecord(
        key="k", signature="s", source_digest="d", measurement=None, failure=cause, built=built,
        step=baseline_step(MATCH) if baseline else step("honest", 1),
        verdict=None if passed is None else Verdict(validator="v", outcome=Outcome.PASS if passed else Outcome.FAIL)),
    st.booleans(), st.none() | st.booleans(), st.none() | st.sampled_from(Cause), st.booleans()), max_size=12)


@given(records=RECORDS)
def test_no_record_is_counted_for_what_it_is_not(records: list[TuningRecord]) -> None:
    plan, seen = planned((step("honest", 1),)), Seen()
    counts = statistics(evolve(compilation(plan, Evaluated(), seen), records=tuple(records)))
    ours = [r for r in records if r.step.implementation != FRAMEWORK]
    assert counts["evaluated"] == len(ours)
    assert counts["built"] == len([r for r in ours if r.built])
    assert counts["validated"] == len([r for r in ours if r.verdict and r.verdict.outcome is Outcome.PASS and r.failure is None])


@pytest.fixture(scope="module")
def benchmarks() -> Any:
    """Modules of the benchmarks, which are scripts."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    found = {}
    try:
        for name in ("tables", "decode"):
            spec = importlib.util.spec_from_file_location(f"counted_{name}", ROOT / "benchmarks" / f"{name}.py")
            found[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found[name])
        yield SimpleNamespace(**found)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        for name in ("tables", "chart", "harness"):
            sys.modules.pop(name, None)


def document(row: dict[str, Any]) -> dict[str, Any]:
    return {**dict.fromkeys(("schema", "gpu", "driver", "versions", "commit", "date", "read_ceiling_gbps"), "x"), "rows": [row]}


def test_a_row_of_pipeline_json_says_what_the_records_say(benchmarks: Any) -> None:
    plan, found, seen = searched(["honest", "wrong", "no_build", "callable"])
    done = compilation(plan, found, seen)
    model = SimpleNamespace(statistics=statistics(done), compilation=SimpleNamespace(
        programs={"decode": framework_program(plan.region.graph)}, step_us=(1.0, 2.0)))
    row = benchmarks.decode.pipeline_row("tiny", model)
    assert [row[key] for key in benchmarks.tables.FUNNEL] == [4, 4, 4, 3, 2, 0]
    benchmarks.tables.check("pipeline", document(row))
    with pytest.raises(benchmarks.tables.ResultsError, match="each is a part of the one before"):
        benchmarks.tables.check("pipeline", document({**row, "built": 5}))
