"""Lower, validate and select over doubles: only evidence selects, what is known is not measured again, every no has a reason."""

from types import SimpleNamespace

import pytest
from agentcompile_cuda_kit.targets import PRESETS
from attrs import evolve

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import Cause
from agentcompile_core.ir.advice import Advice, AdviceRecord, OrderedPlan
from agentcompile_core.ir.baseline import baseline_step
from agentcompile_core.ir.candidate import Candidate
from agentcompile_core.ir.evaluated import Evaluated
from agentcompile_core.ir.graph import Graph, Node, Ref
from agentcompile_core.ir.plan import Cover, Fusion, Origin, PlanSpace, RegionPlan, Schedule, Step
from agentcompile_core.ir.record import TuningRecord
from agentcompile_core.ir.region import Instance, Region, RegionSummary
from agentcompile_core.ir.search_log import Reason
from agentcompile_core.ir.selection import Basis, Selection
from agentcompile_core.ir.verdict import Outcome, Verdict
from agentcompile_core.plugin.events import CandidateFinished, Event, RegionSelected
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
    return OrderedPlan(plan=planned(region()), steps=steps, ranks=tuple(range(len(steps))), record=record)


def planned(of: Region, *covers: Cover) -> RegionPlan:
    full = covers or (Cover(matches=(MATCH,), fusion=Fusion.FULL, rank=0),)
    space = PlanSpace(signature="s1", covers=(*full, Cover(matches=(), fusion=Fusion.FRAMEWORK, rank=99)), steps=())
    summary = RegionSummary(signature="s1", label="mixed", operators=(), instances=1, matches=(), dominant="elementwise")
    return RegionPlan(region=of, summary=summary, space=space)


def validated(ctx: Context, ordered: tuple[OrderedPlan, ...], left_s: float = 60.0) -> tuple[TuningRecord, ...]:
    return validate.run(lower.run(ordered, ctx), ordered, left_s, ctx).records


def run(ctx: Context, *steps: Step):
    ordered = (plan(*steps),)
    found = validate.run(lower.run(ordered, ctx), ordered, 60.0, ctx)
    return found.records, select.run((ordered[0].plan,), found, ctx).selections[0]


def chosen(of: Region, records: tuple[TuningRecord, ...] | list[TuningRecord], ctx: Context, *covers: Cover) -> Selection:
    """What is selected on ``records``, of which every one has the source of its step."""
    candidates = tuple(Candidate(signature="s1", step=r.step, source=doubles.fake_source("honest", r.measurement.us))
                       for r in records if r.measurement and r.step.implementation == FAMILY)
    found = Evaluated(candidates=candidates, records=tuple(records))
    return select.run((planned(of, *covers),), found, ctx).selections[0]


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
    ordered = (plan(step("honest", 4.0), step("hang"), step("honest", 3.0)),)
    records = validated(made, ordered, 2.0)
    assert [r.step for r in records if r.measurement and r.step.implementation == FAMILY] == [step("honest", 4.0)]
    warm = context(worker=None)
    warm.store, warm.worker = made.store, _Forbidden()
    again = validated(warm, ordered)
    assert {r.step for r in again} == {r.step for r in records}
    later = (evolve(plan(step("honest", 2.0)), record=evolve(ordered[0].record, round=1)),)
    assert not [r for r in validated(warm, later) if r.step.implementation == FAMILY]
    patient = context(worker=made.worker, budget_s=500.0)
    patient.store = made.store
    found = validated(patient, ordered)
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


def test_what_earlier_rounds_settled_is_what_they_hand_in_and_not_what_the_store_holds(worker: Worker):
    made = context(worker)
    made.backend = made.catalog.backends["doubles/no_time"]
    records = validated(made, (plan(step("honest", 7.0)),))
    second = plan(step("honest", 9.0))
    later = (evolve(second, record=evolve(second.record, round=1)),)
    found = validate.run(lower.run(later, made), later, 60.0, made, records)
    assert found.records == () and [u.reason for u in found.untried] == [Reason.SETTLED]
    other = (evolve(later[0], steps=(step("honest", 11.0),)),)
    assert [r.step for r in validated(made, other)] == [step("honest", 11.0)], "nothing was handed in, so nothing is settled"


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
    assert lower.run((plan(step("honest"), step("wrong")),), made) == ()
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
    selection = chosen(two_additions(), records, made, *COVERS)
    assert selection.cover.matches == expected


def test_a_step_falls_back_alone():
    made = context()
    records = [record(m, 10.0, implementation="framework") for m in (ONE, TWO)] + [record(ONE, 5.0), record(TWO, 12.0)]
    selection = chosen(two_additions(), records, made, *COVERS)
    assert selection.cover.matches == (ONE,)
    assert selection.cover.fusion is Fusion.PARTIAL
    reasons = dict(selection.fallback_reasons)
    assert "12.00 us, the framework 10.00 us" in reasons[TWO]
    assert "add2" in reasons["1 nodes"]


def test_noise_counts_against_the_candidate():
    made = context()
    records = [record(ONE, 10.0, implementation="framework", spread=1.5), record(ONE, 9.0, spread=0.2)]
    selection = chosen(region(), records, made)
    assert selection.basis is Basis.FALLBACK


class Judge:
    """In place of the captured chain: remembers what it was asked, and says that the whole step takes ``us``."""

    def __init__(self, us: float, framework_us: float = 100.0) -> None:
        self.us, self.framework_us = us, framework_us
        self.asked: list[tuple[Selection, ...]] = []

    def __call__(self, graph: Graph, plans: object, selections: tuple[Selection, ...], found: Evaluated, ctx: Context):
        self.asked.append(selections)
        answer = None if self.us < 0 else SimpleNamespace(us=self.us, framework_us=self.framework_us)
        return tuple(evolve(s, basis=Basis.CHAIN) for s in selections), answer


@pytest.mark.parametrize(("us", "basis"), [(50.0, Basis.CHAIN), (99.9, Basis.FALLBACK), (101.0, Basis.FALLBACK), (-1.0, Basis.FALLBACK)])
def test_the_chain_starts_with_what_lost_alone_and_the_whole_step_decides(us: float, basis: Basis, monkeypatch: pytest.MonkeyPatch):
    events: list[Event] = []
    made, judge = context().watched(events.append), Judge(us)
    monkeypatch.setattr(select.chain, "possible", lambda ctx: True)
    monkeypatch.setattr(select.chain, "run", judge)
    records = (record(ONE, 10.0, implementation="framework"), record(ONE, 12.0))
    found = Evaluated(records=records, candidates=(Candidate(signature="s1", step=records[1].step,
                                                             source=doubles.fake_source("honest", 12.0)),))
    selected = select.run((planned(region()),), found, made, doubles.fake_match()[1])
    assert [s.step for s in judge.asked[0][0].steps] == [step("honest", 12.0)], "beside the framework's step it is slower, alone"
    assert [s.basis for s in selected.selections] == [basis]
    assert selected.step_us == ((us, 100.0) if us > 0 else (0.0, 0.0))
    told = [event for event in events if isinstance(event, RegionSelected)]
    assert [event.basis for event in told] == [basis.value], "one word per region, of what was selected in the end"
    assert select.run((planned(region()),), evolve(found, records=records[:1]), made, doubles.fake_match()[1]).selections[0].steps == ()
    assert len(judge.asked) == 1, "without a usable record there is nothing to judge"


def test_no_kernel_is_lowered_again_to_be_selected(ctx, monkeypatch: pytest.MonkeyPatch):
    made, _ = ctx
    ordered = (plan(step("honest", 4.0)),)
    found = validate.run(lower.run(ordered, made), ordered, 60.0, made)
    monkeypatch.setattr(made.catalog.template_families[FAMILY], "lower", None)
    (selection,) = select.run((ordered[0].plan,), found, made).selections
    assert selection.steps[0].source is not None and selection.steps[0].source.digest in found.kernels


def test_a_candidate_without_a_baseline_is_not_called_faster():
    made = context()
    selection = chosen(region(), [record(ONE, 3.0)], made)
    assert selection.basis is Basis.FALLBACK
    assert "could not be timed" in dict(selection.fallback_reasons)[ONE]


def test_a_source_that_changed_since_is_not_used():
    made = context()
    records = (record(ONE, 10.0, implementation="framework"), evolve(record(ONE, 3.0), source_digest="another"))
    selection = chosen(region(), records, made)
    assert selection.basis is Basis.FALLBACK
    assert "(another) is not what its best kernel lowers to" in dict(selection.fallback_reasons)[ONE]
