"""What was not tried, and why, is data and text; counts agree with the records; a new plugin is tried on a warm cache."""

import json
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agentcompile_rules_transformers
import pytest
from addition_module import MODULE
from agentcompile_cuda_kit.targets import PRESETS
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import agentcompile_core as ac
from agentcompile_core import report
from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.ir.advice import Advice, AdviceRecord, OrderedPlan
from agentcompile_core.ir.baseline import FRAMEWORK
from agentcompile_core.ir.decisions import ChainTrial
from agentcompile_core.ir.evaluated import Evaluated
from agentcompile_core.ir.plan import Cover, Fusion, Origin, Parameter, PlanSpace, RegionPlan, Schedule, ScheduleSpace, Step, StepSpace
from agentcompile_core.ir.record import TuningRecord
from agentcompile_core.ir.region import Instance, Region, RegionSummary
from agentcompile_core.ir.search_log import Reason, Seen, Untried, tried
from agentcompile_core.ir.verdict import Outcome, Verdict
from agentcompile_core.plugin.catalog import Catalog
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.stages import lower, validate
from agentcompile_core.stages.select.chain.annotated import _outcome
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles
from agentcompile_core.worker import Worker
from agentcompile_core.worker.chain_question import Alternative

TINY = Path(__file__).parent.parent / "examples" / "tiny_model"
MATCH = "elementwise:add+1:add"
DOUBLES = "agentcompile_core.testing.doubles:catalog"


def points(count: int) -> ScheduleSpace:
    values = tuple(range(count))
    return ScheduleSpace(parameters=(Parameter(name="n", values=values),), points=tuple(Schedule({"n": n}) for n in values))


def step(n: int, implementation: str = "a/a", match: str = "m") -> Step:
    return Step(match_id=match, implementation=implementation, origin=Origin.GENERATED, schedule=Schedule({"n": n}))


def passed(n: int) -> TuningRecord:
    return TuningRecord(key=f"k{n}", signature="s", step=step(n), source_digest="d", measurement=None,
                        verdict=Verdict(validator="v", outcome=Outcome.PASS))


SPACE = PlanSpace(signature="s", covers=(Cover(matches=("m",), fusion=Fusion.FULL, rank=0),),
                  steps=(StepSpace(match_id="m", implementation="a/a", origin=Origin.GENERATED, version=2, space=points(8)),
                         StepSpace(match_id="other", implementation="a/a", origin=Origin.GENERATED, version=2, space=points(3))),
                  rejects=(("m", "b/b", "needs sm_100"), ("other", "b/b", "needs sm_100")), broken=(("m", "c/c", "KeyError: 'k'"),))


def planned(space: PlanSpace, name: str) -> RegionPlan:
    match, graph = doubles.fake_match()
    region = Region(name=name, signature=space.signature, graph=graph, instances=(Instance(nodes=(("add", "add"),), values=()),),
                    matches=(match,))
    summary = RegionSummary(signature=space.signature, label="mixed", operators=(), instances=1, matches=(), dominant="elementwise")
    return RegionPlan(region=region, summary=summary, space=space)


@settings(derandomize=True, max_examples=100)
@given(fate=st.lists(st.sampled_from(["evaluated", "cached", "untried", "lowered", "ordered", "never"]), min_size=8, max_size=8),
       reason=st.sampled_from(Reason))
def test_every_schedule_of_the_space_is_accounted_for(fate: list[str], reason: Reason) -> None:
    def those(*names: str) -> list[int]:
        return [n for n, what in enumerate(fate) if what in names]

    ordered = frozenset(("s", step(n)) for n in those("evaluated", "cached", "untried", "lowered", "ordered"))
    lowered = frozenset(("s", step(n)) for n in those("evaluated", "cached", "untried", "lowered"))
    seen = Seen(ordered=ordered, lowered=lowered, cached=frozenset(("s", step(n)) for n in those("cached")),
                untried=tuple(Untried(signature="s", step=step(n), reason=reason) for n in those("untried")))
    found = {(t.match, t.implementation): t for t in tried([planned(SPACE, "layer")], map(passed, those("evaluated", "cached")), seen)}
    one = found["m", "a/a"]
    assert one.space == 8 == one.evaluated + sum(count for _, count in one.untried)
    assert (one.evaluated, one.cached, one.passed) == (len(those("evaluated", "cached")), len(those("cached")), one.evaluated)
    expected = Counter({Reason.NOT_LOWERED.value: len(those("ordered")), Reason.PLANS.value: len(those("never"))})
    expected[reason.value] += len(those("untried"))
    expected[Reason.TIME.value] += len(those("lowered"))
    assert Counter(dict(one.untried)) == +expected
    assert found["other", "a/a"].untried == ((Reason.NO_COVER.value, 3),)
    assert found["m", "b/b"].refused == "needs sm_100" and found["m", "c/c"].broken == "KeyError: 'k'"


def test_the_text_groups_by_implementation_and_reason() -> None:
    text = report.untried_text(tried([planned(SPACE, "layer")], [passed(0)], Seen()))
    assert f"a/a: 7 schedules of 1 matches: {Reason.PLANS.value}" in text
    assert "b/b: 2 matches: it refused them: needs sm_100" in text and "c/c: 1 matches: its plugin failed: KeyError: 'k'" in text


@pytest.fixture(scope="module")
def worker():
    with Worker(catalog=DOUBLES, deadlines_s={"check": 3.0}, builders=2) as made:
        yield made


def context(worker: Worker, store: Store, backend: str = "fake") -> Context:
    catalog = doubles.catalog()
    catalog.template_families["late/late"] = catalog.template_families["doubles/fake_family"]
    return Context(catalog=catalog, target=PRESETS["h200"], config=Config(validators=("simple",)), store=store,
                   backend=catalog.backends[f"doubles/{backend}"], worker=worker)


def ordered(*families: str, behaviours: tuple[str, ...] = ("honest",), version: int = 1) -> tuple[OrderedPlan, ...]:
    """Every family with the same behaviours, at times of its own."""
    steps = tuple(Step(match_id=MATCH, implementation=name, origin=Origin.GENERATED,
                       schedule=Schedule({"behave": behaviour, "us": 5.0 + len(name) + i}))
                  for name in families for i, behaviour in enumerate(behaviours))
    record = AdviceRecord(advisor="test", signature="s1", round=0, accepted=Advice())
    served = tuple(StepSpace(match_id=MATCH, implementation=name, origin=Origin.GENERATED, space=points(1),
                             version=version if name == "late/late" else 1) for name in families)
    plan = planned(PlanSpace(signature="s1", covers=(), steps=served), "addition")
    return (OrderedPlan(plan=plan, steps=steps, ranks=tuple(range(len(steps))), record=record),)


def evaluate(ctx: Context, plans: tuple[OrderedPlan, ...], left_s: float = 60.0) -> Evaluated:
    return validate.run(lower.run(plans, ctx), plans, left_s, ctx)


def who(found: Evaluated) -> set[str]:
    return {r.step.implementation for r in found.records} - {FRAMEWORK}


@pytest.mark.parametrize("backend", ["fake", "no_time"])
def test_a_newly_installed_family_is_tried_on_a_warm_cache(worker: Worker, backend: str) -> None:
    store = Store(None)
    assert who(evaluate(context(worker, store, backend), ordered("doubles/fake_family"))) == {"doubles/fake_family"}
    found = evaluate(context(worker, store, backend), ordered("doubles/fake_family", "late/late"))
    assert who(found) == {"doubles/fake_family", "late/late"}
    assert {s.implementation for _, s in found.cached} == {"doubles/fake_family"}
    again = evaluate(context(worker, store, backend), ordered("doubles/fake_family", "late/late"))
    assert {s.implementation for _, s in again.cached} == who(again) == {"doubles/fake_family", "late/late"}


def test_a_family_with_another_version_is_tried_again_where_it_was_settled(worker: Worker) -> None:
    store = Store(None)
    first = evaluate(context(worker, store, "no_time"), ordered("doubles/fake_family", "late/late", behaviours=("honest",) * 6))
    assert {u.reason for u in first.untried} <= {Reason.SETTLED, Reason.SAME_SOURCE}
    warm = evaluate(context(worker, store, "no_time"), ordered("doubles/fake_family", "late/late", behaviours=("honest",) * 6))
    assert len(warm.records) == len(first.records), "nothing changed, so nothing is done"
    changed = ordered("doubles/fake_family", "late/late", behaviours=("honest",) * 6, version=2)
    assert len(evaluate(context(worker, store, "no_time"), changed).records) >= len(first.records)


def test_a_worker_that_starts_slowly_costs_none_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker(catalog=DOUBLES, builders=1) as slow:
        prepare = slow.prepare
        monkeypatch.setattr(slow, "prepare", lambda *args: (time.sleep(2.0), prepare(*args)))
        ctx = context(slow, Store(None))
        ctx.budget.start()
        end = ctx.budget.stop_at()
        assert who(evaluate(ctx, ordered("doubles/fake_family"), 1.0)) == {"doubles/fake_family"}
        assert ctx.budget.stop_at() >= end + 1.9


def test_time_and_settled_rivals_are_the_reasons(worker: Worker) -> None:
    late = evaluate(context(worker, Store(None)), ordered("doubles/fake_family", behaviours=("honest", "hang", "honest")), 2.0)
    assert Counter(u.reason for u in late.untried)[Reason.TIME] >= 1
    assert len(late.untried) + len([r for r in late.records if r.step.implementation != FRAMEWORK]) == 3
    settled = evaluate(context(worker, Store(None), "no_time"), ordered("doubles/fake_family", behaviours=("honest",) * 9))
    assert {u.reason for u in settled.untried} == {Reason.SETTLED}
    without = context(worker, Store(None))
    without.backend = None
    assert {u.reason for u in evaluate(without, ordered("doubles/fake_family")).untried} == {Reason.NO_JUDGE}


def test_the_chain_never_says_that_nothing_was_faster_where_nothing_was_tried() -> None:
    chosen = SimpleNamespace(step=step(1))
    def way(number: int | None) -> Any:
        return Alternative(signature="s", match_id="m", selected=None if number is None else SimpleNamespace(step=step(number)))

    selections = (SimpleNamespace(signature="s", steps=(chosen,)),)

    def said(tried: tuple[int | None, ...], *numbers: int | None) -> str:
        trials = (ChainTrial(signature="s", match_id="other", step=step(9, match="other")),  # of another step
                  *(ChainTrial(signature="s", match_id="m", step=None if n is None else step(n)) for n in tried))
        question = SimpleNamespace(covers=(), selections=selections, alternatives=tuple(map(way, numbers)))
        return _outcome(chosen, "s", SimpleNamespace(trials=trials), question)

    assert "no alternative to try" in said((), 1)
    assert "none of its 1 alternatives was tried" in said((), 1, 2)
    assert "none of its 1 alternatives was faster" in said((2,), 1, 2)
    assert "of its 3 alternatives none that the time allowed was faster" in said((2, 2, None), 1, 2, 3, None)
    assert "none of its 3 alternatives was faster" in said((2, 3, None), 1, 2, 3, None)


class Late(doubles.FakeFamily):
    """A family that adds, installed after the first compile."""

    name = "late"

    def space(self, match: Any, target: Any) -> ScheduleSpace:
        """One honest schedule, whose source no other family lowers to."""
        point = Schedule({"behave": "honest", "us": 6.5})
        parameters = (Parameter(name="behave", values=("honest",)), Parameter(name="us", values=(6.5,)))
        return ScheduleSpace(parameters=parameters, points=(point,))


@hookimpl
def agentcompile_template_families() -> list[Any]:
    return [doubles.FakeFamily()]


@hookimpl
def agentcompile_backends() -> list[Any]:
    return [doubles.NoTimeBackend()]


@hookimpl
def agentcompile_validators() -> list[Any]:
    return [doubles.SimpleValidator()]




def compiled(store: Store, model: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch, *extra: tuple[str, object]) -> Any:
    """The addition compiled with the doubles, and with ``extra`` plugins."""
    monkeypatch.setattr(Context, "running_worker", lambda ctx: worker)
    base = SimpleNamespace(agentcompile_template_families=agentcompile_template_families,
                           agentcompile_backends=agentcompile_backends, agentcompile_validators=agentcompile_validators)
    catalog: Catalog = load_catalog(only=(), extra=[("doubles", base), ("rules", agentcompile_rules_transformers), *extra])
    config = Config(validators=("simple",), backend="no_time", rounds=1)
    return ac.compile(str(model), device="cpu", run_on="nothing", catalog=catalog, store=store, config=config)


def test_compile_tries_a_family_that_was_installed_since(worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "addition.py"
    model.write_text(MODULE)
    store = Store(tmp_path / "store")
    cold = compiled(store, model, worker, monkeypatch)
    assert {t.implementation for t in cold.compilation.tried if t.evaluated} == {"doubles/fake_family"}
    late = SimpleNamespace(agentcompile_template_families=hookimpl(lambda: [Late()]))
    warm = compiled(store, model, worker, monkeypatch, ("late", late))
    counts = {t.implementation: t for t in warm.compilation.tried if t.space}
    assert counts["late/late"].evaluated >= 1
    assert counts["doubles/fake_family"].cached == counts["doubles/fake_family"].evaluated >= 1
    check_counts(warm)


def check_counts(compilation: Any) -> None:
    """The published counts are those of the records."""
    found, result = compilation.statistics, compilation.compilation
    records = [r for r in result.records if r.step.implementation != FRAMEWORK]
    assert found["candidates"] >= found["lowered"] >= found["evaluated"] >= found["built"] >= found["validated"]
    assert found["evaluated"] == len(records) == sum(t.evaluated for t in result.tried)
    assert found["validated"] == sum(1 for r in records if r.verdict is not None and r.verdict.passed and r.failure is None)
    assert found["candidates"] == sum(t.space for t in result.tried) == found["evaluated"] + found["untried"]


def test_counts_agree_with_the_records_of_the_tiny_model(tiny_compiled) -> None:
    folder, document = tiny_compiled
    records = [r for r in json.loads((folder / "records.json").read_text()) if r["step"]["implementation"] != FRAMEWORK]
    found, search = document["statistics"], json.loads((folder / "search.json").read_text())
    assert found["evaluated"] == len(records) == sum(t["evaluated"] for t in search)
    assert found["lowered"] >= found["evaluated"] >= found["built"] >= found["validated"]
    assert found["candidates"] == found["evaluated"] + found["untried"]
    assert found["built"] == sum(r["built"] for r in records)
    passed = [r for r in records if r["failure"] is None and r["verdict"]["outcome"] in ("pass", "provisional")]
    assert found["validated"] == len(passed) == sum(t["passed"] for t in search)
    assert found["selected"] == sum(len(s["steps"]) for s in document["selections"])
    assert document["search"] == search and document["failures"] == json.loads((folder / "failures.json").read_text())


def test_explain_says_what_was_not_tried(cli, tiny_bundle: Path) -> None:
    code, out, err = cli("explain", tiny_bundle)
    assert code == 0, err
    assert "not tried" in out and Reason.PLANS.value in out and "it refused them: " in out
    code, out, _ = cli("explain", tiny_bundle, "--json")
    document = json.loads(out)
    assert any(t["untried"] for t in document["search"]) and any(t["refused"] for t in document["search"])
    assert evolve(SPACE, broken=()) != SPACE
