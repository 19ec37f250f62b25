"""Select: covers by what they save, noise and margin, the chain as judge of the whole step."""

from types import SimpleNamespace

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from select_cases import FAMILY, MATCH, chosen, context, planned, region, step

from agentcompile_core.context import Context
from agentcompile_core.errors import Cause
from agentcompile_core.ir.baseline import baseline_step
from agentcompile_core.ir.candidate import Candidate
from agentcompile_core.ir.decisions import Decisions, choices_of
from agentcompile_core.ir.evaluated import Evaluated
from agentcompile_core.ir.graph import Graph, Node, Ref
from agentcompile_core.ir.plan import Cover, Fusion
from agentcompile_core.ir.record import TuningRecord
from agentcompile_core.ir.region import Instance, Region
from agentcompile_core.ir.selection import Basis, Selection
from agentcompile_core.ir.verdict import Outcome, Verdict
from agentcompile_core.plugin.events import Event, RegionSelected
from agentcompile_core.report.audit import audit
from agentcompile_core.stages import select
from agentcompile_core.testing import doubles


def record(match_id: str, us: float, order: int = 0, implementation: str = FAMILY, spread: float = 0.01) -> TuningRecord:
    made = step("honest", us, match_id) if implementation == FAMILY else baseline_step(match_id)
    verdict = Verdict(validator="simple", outcome=Outcome.PASS) if implementation == FAMILY else None
    return TuningRecord(key=f"{match_id}{us}{implementation}", signature="s1", step=made, verdict=verdict, order=order,
                        source_digest=doubles.fake_source("honest", us).digest, measurement=doubles.measurement(us, spread))


def two_additions(view: bool = False) -> Region:
    """y = (a + b) + b: one match for both nodes would be fused; here two single ones and their union, with the view between them if any."""
    match, graph = doubles.fake_match()
    between = Node(name="view", op="aten.view.default", kind="view", args=(Ref("sum"), (100,)), outputs=("seen",))
    second = Node(name="add2", op="aten.add.Tensor", kind="add", args=(Ref("seen" if view else "sum"), Ref("b")), outputs=("sum2",))
    values = (*graph.values, *(evolve(graph.values[-1], name=name) for name in (*["seen"] * view, "sum2")))
    graph = Graph(name="g", kind=graph.kind, values=values, nodes=(*graph.nodes, *[between] * view, second), inputs=graph.inputs,
                  outputs=("sum2",))
    other = evolve(match, nodes=("add2",))
    both = evolve(match, nodes=("add", *["view"] * view, "add2"))
    matches = (match, other, both, *([evolve(match, nodes=("view",))] if view else []))
    return Region(name="r", signature="s1", graph=graph, instances=(Instance(nodes=(), values=()),), matches=matches)


ONE, TWO, BOTH, SEEN = MATCH, "elementwise:add2+1:add2", "elementwise:add+2:add2", "elementwise:add+3:add2"
VIEW = "elementwise:view+1:view"
COVERS = (Cover(matches=(BOTH,), fusion=Fusion.FULL, rank=0), Cover(matches=(ONE, TWO), fusion=Fusion.NONE, rank=1))


@pytest.mark.parametrize(("fused_us", "expected"), [(6.0, (BOTH,)), (14.0, (ONE, TWO)), (25.0, (ONE, TWO))])
def test_covers_compare_by_what_they_save(fused_us: float, expected: tuple[str, ...]):
    made = context()
    records = [record(m, us, implementation="framework") for m, us in ((ONE, 10.0), (TWO, 10.0), (BOTH, 20.0))]
    records += [record(ONE, 5.0), record(TWO, 6.0), record(BOTH, fused_us)]
    selection = chosen(two_additions(), records, made, *COVERS)
    assert selection.cover.matches == expected


@given(fused_us=st.floats(1.0, 30.0), noise=st.floats(0.9, 1.1), framework_us=st.floats(100.0, 1000.0), view=st.booleans())
def test_of_covers_of_the_same_nodes_the_kernels_decide_and_no_noise_of_the_framework(fused_us: float, noise: float, framework_us: float,
                                                                                      view: bool):
    """Attention over a long cache takes the framework 770 us; 4 us more or less of that had decided for two more kernels.

    The one that is fused may have a view in it, which nothing else has: 1.3 us had decided so again.
    """
    both, both_us = SEEN if view else BOTH, (framework_us + 10.0) * noise
    covers = (evolve(COVERS[0], matches=(both,)), COVERS[1])
    records = [record(m, us, implementation="framework") for m, us in ((ONE, framework_us), (TWO, 10.0), (both, both_us))]
    records += [record(ONE, 5.0), record(TWO, 6.0), record(both, fused_us)]
    selection = chosen(two_additions(view), records, context(), *covers)
    assert fused_us == 11.0 or selection.cover.matches == ((both,) if fused_us < 11.0 else (ONE, TWO))


def test_without_a_rival_the_kernels_decide_though_the_frameworks_time_is_not_known():
    records = [record(TWO, 9.0, implementation="framework"), record(BOTH, 20.0, implementation="framework")]
    records += [record(ONE, 2.0), record(TWO, 3.0), record(BOTH, 15.0)]
    selection = chosen(two_additions(), records, context(origins=("generated",)), *COVERS)
    assert selection.cover.matches == (ONE, TWO)


TIMES = st.one_of(st.none(), st.floats(1.0, 30.0))


@settings(max_examples=400, deadline=None)
@given(data=st.data(), view=st.booleans())
def test_the_audit_follows_every_choice_of_a_cover(data: st.DataObject, view: bool):
    """Over records of some matches, kernels and framework apart, in covers of one, two and all nodes."""
    both = SEEN if view else BOTH
    alone = [(VIEW,), (ONE, VIEW, TWO)] if view else []
    covers = [Cover(matches=matches, fusion=Fusion.PARTIAL, rank=rank) for rank, matches in enumerate(
        data.draw(st.permutations([(both,), (ONE, TWO), (ONE,), (TWO,), *alone])))]
    origins = data.draw(st.sampled_from([(), ("generated",)]))
    of, ctx, records = two_additions(view), context(**({"origins": origins} if origins else {})), []
    for match in (ONE, TWO, both, *([VIEW] if view else [])):
        ours_us, framework_us = data.draw(TIMES), data.draw(TIMES)
        records += [record(match, ours_us)] if ours_us else []
        records += [record(match, framework_us * 2.0, implementation="framework")] if framework_us else []
    selection = chosen(of, records, ctx, *covers)
    made = Decisions(margin=ctx.config.margin, advisor="test", validators=("simple",), competes=not origins,
                     regions=choices_of((planned(of, *covers),)), places=tuple(range(len(records))))
    assert [one for one in audit((selection,), tuple(records), made, {}) if one.problems] == []


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_part_whose_kernels_failed_or_were_not_tried_tells_the_time_all_the_same(evaluated: bool):
    """Selection left such a part out, the audit and the search's turns did not: they chose other covers."""
    records = [record(m, us, implementation="framework") for m, us in ((ONE, 770.0), (TWO, 10.0), (BOTH, 776.0))]
    records += [record(TWO, 6.0), record(BOTH, 773.0)]  # by parts 4 and 7 us are saved, by its own time BOTH saves 3
    if evaluated:
        records.append(evolve(record(ONE, 700.0), measurement=None, failure=Cause.TOLERANCE))
    selection = chosen(two_additions(), records, context(margin=0.0), *COVERS)
    assert selection.cover.matches == (BOTH,)


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
        answer = None if self.us < 0 else SimpleNamespace(us=self.us, framework_us=self.framework_us, trials=())
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
