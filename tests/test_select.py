"""Lower, validate and select over doubles: only evidence selects, what is known is not measured again, every no has a reason."""

import pytest
from agentcompile_cuda_kit.targets import PRESETS
from attrs import evolve

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import Cause
from agentcompile_core.ir.advice import Advice, AdviceRecord, OrderedPlan
from agentcompile_core.ir.baseline import baseline_step
from agentcompile_core.ir.graph import Graph, Node, Ref
from agentcompile_core.ir.plan import Cover, Fusion, Origin, PlanSpace, Schedule, Step
from agentcompile_core.ir.record import TuningRecord
from agentcompile_core.ir.region import Instance, Region
from agentcompile_core.ir.selection import Basis
from agentcompile_core.ir.verdict import Outcome, Verdict
from agentcompile_core.plugin.events import CandidateFinished, Event
from agentcompile_core.stages import lower, select, validate
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles
from agentcompile_core.worker import Worker

FAMILY = "doubles/fake_family"
MATCH = "elementwise:add+1:add"


@pytest.fixture(scope="module")
def worker():
    with Worker(catalog="agentcompile_core.testing.doubles:catalog", deadlines_s={"check": 3.0}, builders=2) as made:
        yield made


def context(worker: Worker | None = None, **config: object) -> Context:
    catalog = doubles.catalog()
    return Context(catalog=catalog, target=PRESETS["h200"], config=Config(**{"validators": ("simple",), **config}), store=Store(None),
                   backend=catalog.backends["doubles/fake"], worker=worker)


def region() -> Region:
    match, graph = doubles.fake_match()
    return Region(name="addition", signature="s1", graph=graph, instances=(Instance(nodes=(("add", "add"),), values=()),), matches=(match,))


def step(behaviour: str, us: float = 5.0, match_id: str = MATCH) -> Step:
    return Step(match_id=match_id, implementation=FAMILY, origin=Origin.GENERATED, schedule=Schedule({"behave": behaviour, "us": us}))


def plan(*steps: Step) -> OrderedPlan:
    record = AdviceRecord(advisor="test", signature="s1", round=0, accepted=Advice())
    return OrderedPlan(signature="s1", steps=steps, ranks=tuple(range(len(steps))), record=record)


def space(*covers: Cover) -> PlanSpace:
    full = covers or (Cover(matches=(MATCH,), fusion=Fusion.FULL, rank=0),)
    return PlanSpace(signature="s1", covers=(*full, Cover(matches=(), fusion=Fusion.FRAMEWORK, rank=99)), steps=())


def run(ctx: Context, *steps: Step):
    regions, ordered = (region(),), (plan(*steps),)
    candidates = lower.run(regions, ordered, ctx)
    records = validate.run(candidates, regions, ordered, 60.0, ctx)
    return records, select.run(regions, (space(),), records, ctx)[0]


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
    def evaluate(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("a warm run evaluated something")


def test_a_warm_run_does_not_go_on_where_time_ran_out(ctx):
    made, _ = ctx
    regions, ordered = (region(),), (plan(step("honest", 4.0), step("hang"), step("honest", 3.0)),)
    records = validate.run(lower.run(regions, ordered, made), regions, ordered, 2.0, made)
    assert [r.step for r in records if r.measurement and r.step.implementation == FAMILY] == [step("honest", 4.0)]
    warm = context(worker=None)
    warm.store, warm.worker = made.store, _Forbidden()
    again = validate.run(lower.run(regions, ordered, warm), regions, ordered, 60.0, warm)
    assert {r.step for r in again} == {r.step for r in records}
    later = (evolve(plan(step("honest", 2.0)), record=evolve(ordered[0].record, round=1)),)
    assert not [r for r in validate.run(lower.run(regions, later, warm), regions, later, 60.0, warm) if r.step.implementation == FAMILY]
    patient = context(worker=made.worker, budget_s=500.0)
    patient.store = made.store
    found = validate.run(lower.run(regions, ordered, patient), regions, ordered, 60.0, patient)
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
    assert lower.run((region(),), (plan(step("honest"), step("wrong")),), made) == ()
    assert [f.cause for f in made.failures] == [Cause.CONTRACT]
    assert "no launch" in made.failures[0].message


def record(match_id: str, us: float, order: int = 0, implementation: str = FAMILY, spread: float = 0.01) -> TuningRecord:
    made = step("honest", us, match_id) if implementation == FAMILY else baseline_step(match_id)
    verdict = Verdict(validator="simple", outcome=Outcome.PASS) if implementation == FAMILY else None
    return TuningRecord(key=f"{match_id}{us}{implementation}", signature="s1", step=made, verdict=verdict, order=order,
                        source_digest=doubles.fake_source("honest", us).digest, measurement=doubles.measurement(us, spread))


def two_additions() -> Region:
    """y = (a + b) + b: one match for both nodes would be fused; here two single ones and their union."""
    match, graph = doubles.fake_match()
    second = Node(name="add2", op="aten.add.Tensor", kind="add", args=(Ref("sum"), Ref("b")), outputs=("sum2",))
    values = (*graph.values, evolve(graph.values[-1], name="sum2"))
    graph = Graph(name="g", kind=graph.kind, values=values, nodes=(*graph.nodes, second), inputs=graph.inputs, outputs=("sum2",))
    other = evolve(match, nodes=("add2",))
    both = evolve(match, nodes=("add", "add2"))
    return Region(name="r", signature="s1", graph=graph, instances=(Instance(nodes=(), values=()),), matches=(match, other, both))


ONE, TWO, BOTH = MATCH, "elementwise:add2+1:add2", "elementwise:add+2:add2"
COVERS = (Cover(matches=(BOTH,), fusion=Fusion.FULL, rank=0), Cover(matches=(ONE, TWO), fusion=Fusion.NONE, rank=1))


@pytest.mark.parametrize(("fused_us", "expected"), [(6.0, (BOTH,)), (14.0, (ONE, TWO)), (25.0, (ONE, TWO))])
def test_covers_compare_by_what_they_save(fused_us: float, expected: tuple[str, ...]):
    made = context()
    records = [record(m, us, implementation="framework") for m, us in ((ONE, 10.0), (TWO, 10.0), (BOTH, 20.0))]
    records += [record(ONE, 5.0), record(TWO, 6.0), record(BOTH, fused_us)]
    (selection,) = select.run((two_additions(),), (space(*COVERS),), tuple(records), made)
    assert selection.cover.matches == expected


def test_a_step_falls_back_alone():
    made = context()
    records = [record(m, 10.0, implementation="framework") for m in (ONE, TWO)] + [record(ONE, 5.0), record(TWO, 12.0)]
    (selection,) = select.run((two_additions(),), (space(*COVERS),), tuple(records), made)
    assert selection.cover.matches == (ONE,)
    assert selection.cover.fusion is Fusion.PARTIAL
    reasons = dict(selection.fallback_reasons)
    assert "12.00 us, the framework 10.00 us" in reasons[TWO]
    assert "add2" in reasons["1 nodes"]


def test_noise_counts_against_the_candidate():
    made = context()
    records = [record(ONE, 10.0, implementation="framework", spread=1.5), record(ONE, 9.0, spread=0.2)]
    (selection,) = select.run((region(),), (space(),), tuple(records), made)
    assert selection.basis is Basis.FALLBACK


def test_the_chain_overrules_isolated_timings():
    made = context()
    records = [record(ONE, 10.0, implementation="framework"), record(ONE, 3.0), record(ONE, 4.0, order=1)]
    chain = {("s1", step("honest", 3.0)): 1.0, ("s1", step("honest", 4.0)): 2.5}
    (selection,) = select.run((region(),), (space(),), tuple(records), made, chain)
    assert selection.basis is Basis.CHAIN
    assert selection.steps[0].step == step("honest", 4.0)
    (none,) = select.run((region(),), (space(),), tuple(records), made, dict.fromkeys(chain, -0.5))
    assert none.basis is Basis.FALLBACK


def test_a_candidate_without_a_baseline_is_not_called_faster():
    made = context()
    (selection,) = select.run((region(),), (space(),), (record(ONE, 3.0),), made)
    assert selection.basis is Basis.FALLBACK
    assert "could not be timed" in dict(selection.fallback_reasons)[ONE]


def test_a_source_that_changed_since_is_not_used():
    made = context()
    records = (record(ONE, 10.0, implementation="framework"), evolve(record(ONE, 3.0), source_digest="another"))
    (selection,) = select.run((region(),), (space(),), records, made)
    assert selection.basis is Basis.FALLBACK
    assert "another source" in dict(selection.fallback_reasons)[ONE]
