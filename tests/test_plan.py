"""Plan: who is asked, what is recorded, and covers that are always disjoint, convex and able to run."""

import agentcompile_rules_transformers as rules
import pytest
from agentcompile_cuda_kit.targets import preset
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import AgentCompileError, ContractError, Reject, UsageError
from agentcompile_core.ir import serial
from agentcompile_core.ir.graph import DType, Graph, GraphKind, GraphSet, ModelInfo, Node, Ref, TensorSpec, Value, ValueKind, Workload
from agentcompile_core.ir.plan import MAX_COVERS, Fusion, Origin, Parameter, PlanSpace, Schedule, ScheduleSpace
from agentcompile_core.ir.region import Match, SemanticLabel
from agentcompile_core.ops.aliasing import is_alias
from agentcompile_core.ops.dependency import dependencies
from agentcompile_core.plugin.catalog import Catalog
from agentcompile_core.plugin.interfaces import Implementation, TemplateFamily
from agentcompile_core.stages import analyze, plan
from agentcompile_core.stages.plan.covers import covers

ONE = ScheduleSpace(parameters=(Parameter(name="rows", values=(1, 2)),), points=(Schedule({"rows": 1}), Schedule({"rows": 2})))


class Family(TemplateFamily):
    """Serves the kinds it is told to with the space it is told to."""

    name = "family"

    def __init__(self, *kinds, space=ONE, answer=True):
        self.kinds, self.given, self.answer = kinds, space, answer

    def accepts(self, match, target):
        return self.answer if not self.kinds or match.kind in self.kinds else Reject(f"not {match.kind}")

    def space(self, match, target):
        return self.given

    def lower(self, match, schedule, target):
        raise NotImplementedError


class Handwritten(Implementation):
    name = "handwritten"
    origin = Origin.HANDWRITTEN

    def accepts(self, match, target):
        return True if match.kind == "norm" else Reject("norms only")

    def space(self, match, target):
        return ScheduleSpace(parameters=(), points=(Schedule({}),))

    def bind(self, match, schedule, target):
        raise NotImplementedError


def context(*servers, strict=True, **config):
    catalog = Catalog(strict=strict)
    for rule in rules.agentcompile_region_rules():
        catalog.region_rules[f"core/{rule.name}"] = rule
    for i, server in enumerate(servers):
        shelf = catalog.implementations if isinstance(server, Implementation) else catalog.template_families
        shelf[f"p{i}/{server.name}"] = server
    return Context(catalog=catalog, target=preset("h200"), config=Config(**config), store=None)


def analyses_of(graph, ctx):
    model = ModelInfo(name="m", model_type="m", config_json="{}", digest="0", parameter_bytes=0)
    workload = Workload(dtype=DType.F32, max_context=16)
    return analyze.run(GraphSet(model=model, workload=workload, graphs=(graph,)), ctx)


@pytest.fixture
def planned(decode_graphs):
    """``planned(*servers, **options)``: regions, spaces and context of a two-layer decode graph."""
    def make(*servers, strict=True, model=None, **config):
        _, graph = decode_graphs.transformer(layers=2, **(model or {}))
        ctx = context(*servers, strict=strict, **config)
        analyses = analyses_of(graph, ctx)
        return analyses[0].regions, tuple(one.space for one in plan.run(analyses, ctx)), ctx

    return make


def left_over(region, cover):
    covered = {name for match in cover.matches for name in region.match_by_id[match].nodes}
    return [n.kind for n in region.graph.nodes if n.name not in covered and not is_alias(region.graph, n)]


def test_best_cover_of_a_decode_layer_is_five_steps(planned):
    regions, spaces, _ = planned(Family())
    matches = [[regions[i].match_by_id[m] for m in spaces[i].covers[0].matches] for i in range(3)]
    assert [[m.label for m in some] for some in matches] == [
        [SemanticLabel.ROPE_TABLE, SemanticLabel.GATHER],
        [SemanticLabel.QKV_PROJECTION, SemanticLabel.ATTENTION, SemanticLabel.GEMV, SemanticLabel.GATED_MLP, SemanticLabel.GEMV],
        [SemanticLabel.NORM_GEMV, SemanticLabel.ARGMAX],
    ]
    layer = matches[1]
    assert [m.text("norm") for m in layer] == ["rms", "rms", "none", "rms", "none"] and layer[1].flag("rope")
    assert layer[2].operand("aux0") and layer[4].operand("aux0") and matches[2][1].flag("advance")
    assert [left_over(r, s.covers[0]) for r, s in zip(regions, spaces)] == [[], [], []]


@pytest.mark.parametrize("model", [
    {"qk_norm": False}, {"qk_norm": False, "bias": True}, {"qk_norm": False, "fused": True},
    {"norm": "rms_one_plus", "act": "gelu_tanh", "sandwich": True, "cap": 30.0},
    {"qk_norm": False, "rotary_dim": 4, "norm": "layer", "bias": True, "act": "gelu"},
])
def test_other_architectures_leave_nothing_on_the_framework(planned, model):
    regions, spaces, _ = planned(Family(), model=model)
    assert [left_over(r, s.covers[0]) for r, s in zip(regions, spaces)] == [[], [], []]


def test_covers_of_a_layer_have_every_degree_of_fusion(planned):
    _, spaces, _ = planned(Family())
    layer = spaces[1]
    assert {cover.fusion for cover in layer.covers} == set(Fusion)
    assert [cover.rank for cover in layer.covers] == list(range(len(layer.covers))) and len(layer.covers) <= MAX_COVERS
    assert layer.covers[0].fusion is Fusion.FULL and layer.covers[-1].matches == ()
    assert len({cover.matches for cover in layer.covers}) == len(layer.covers)


def test_covers_offer_different_matches(planned):
    regions, spaces, _ = planned(Family())
    used = {match for cover in spaces[1].covers for match in cover.matches}
    assert len(used) >= 0.9 * len(regions[1].matches)


def test_without_a_family_its_nodes_stay_on_the_framework(planned):
    regions, spaces, _ = planned(Family("linear", "norm"))
    assert left_over(regions[1], spaces[1].covers[0]) == ["rope", "rope", "attention"]
    assert left_over(regions[2], spaces[2].covers[0]) == ["argmax", "advance"]
    assert [c.fusion for c in spaces[0].covers] == [Fusion.FRAMEWORK]
    assert {r[1:] for r in spaces[0].rejects} == {("p0/family", "not gather"), ("p0/family", "not rope_table")}


def test_without_any_family_everything_is_framework(planned):
    _, spaces, _ = planned()
    assert all([c.fusion for c in space.covers] == [Fusion.FRAMEWORK] and not space.steps for space in spaces)


def test_covers_use_only_what_someone_serves(planned):
    _, spaces, _ = planned(Family("linear"), Handwritten())
    for space in spaces:
        assert {m for cover in space.covers for m in cover.matches} <= {step.match_id for step in space.steps}
    assert {step.origin for space in spaces for step in space.steps} == {Origin.GENERATED, Origin.HANDWRITTEN}


def test_origins_are_filtered(planned):
    _, spaces, _ = planned(Family(), Handwritten(), origins=("handwritten",))
    assert {step.implementation for space in spaces for step in space.steps} == {"p1/handwritten"}
    assert all(name != "p0/family" for space in spaces for _, name, _ in space.rejects)


def test_unknown_origin_is_the_callers_mistake(planned):
    with pytest.raises(UsageError, match=r"unknown origin 'magic'.*generated"):
        planned(Family(), origins=("magic",))


class Raising(Family):
    name = "raising"

    def accepts(self, match, target):
        raise RuntimeError("broken family")


BAD_SPACES = {
    "too many": ScheduleSpace(parameters=(Parameter(name="n", values=tuple(range(300))),),
                              points=tuple(Schedule({"n": i}) for i in range(300))),
    "twice": ScheduleSpace(parameters=(Parameter(name="n", values=(1,)),), points=(Schedule({"n": 1}), Schedule({"n": 1}))),
    "unlisted value": ScheduleSpace(parameters=(Parameter(name="n", values=(1,)),), points=(Schedule({"n": 2}),)),
    "unlisted type": ScheduleSpace(parameters=(Parameter(name="n", values=(1,)),), points=(Schedule({"n": True}),)),
    "unlisted name": ScheduleSpace(parameters=(), points=(Schedule({"n": 1}),)),
    "no space": [Schedule({"n": 1})],
}


@pytest.mark.parametrize("broken", [Raising(), Family(answer="yes"), *(Family(space=space) for space in BAD_SPACES.values())],
                         ids=["raises", "answers text", *BAD_SPACES])
def test_a_broken_family_is_recorded_and_the_others_go_on(planned, broken):
    healthy = Handwritten()
    _, spaces, ctx = planned(broken, healthy, strict=False)
    assert ctx.catalog.failures and {f.plugin for f in ctx.catalog.failures} == {f"p0/{broken.name}"}
    assert {step.implementation for space in spaces for step in space.steps} == {"p1/handwritten"}
    with pytest.raises((RuntimeError, ContractError, AgentCompileError)):
        planned(broken, healthy, strict=True)


def test_an_empty_space_is_a_reject(planned):
    _, spaces, ctx = planned(Family(space=ScheduleSpace(parameters=(), points=())))
    assert not ctx.catalog.failures and all("no schedule" in reason for space in spaces for *_, reason in space.rejects)


def test_plan_is_deterministic_and_survives_json(planned):
    _, first, _ = planned(Family(), Handwritten())
    _, again, _ = planned(Family(), Handwritten())
    assert first == again and serial.loads(serial.dumps(first[1]), PlanSpace) == first[1]


def test_equal_regions_of_several_analyses_are_planned_once(decode_graphs):
    _, graph = decode_graphs.transformer(layers=2)
    ctx = context(Family())
    analyses = analyses_of(graph, ctx)
    assert len(plan.run((*analyses, *analyses), ctx)) == len(analyses[0].regions)


# ---- properties of covers, over random graphs and random convex matches

SPEC = TensorSpec(shape=(4,), dtype=DType.F32)


@st.composite
def regions_with_matches(draw):
    count = draw(st.integers(2, 12))
    nodes, values = [], [Value(name="x", spec=SPEC, kind=ValueKind.INPUT)]
    for i in range(count):
        sources = draw(st.lists(st.sampled_from([v.name for v in values]), min_size=1, max_size=2))
        nodes.append(Node(name=f"n{i}", op="aten.add.Tensor", kind="add", args=tuple(map(Ref, sources)), outputs=(f"v{i}",)))
        values.append(Value(name=f"v{i}", spec=SPEC))
    graph = Graph(name="g", kind=GraphKind.FORWARD, values=tuple(values), nodes=tuple(nodes), inputs=("x",), outputs=(f"v{count - 1}",))
    deps = dependencies(graph)
    masks = draw(st.sets(st.integers(1, (1 << count) - 1), max_size=14))
    matches = tuple(Match(kind=f"k{mask}", label=SemanticLabel.MIXED, nodes=deps.members(mask), operands=())
                    for mask in sorted(masks) if deps.is_convex(mask))
    return graph.verify(), matches


@given(case=regions_with_matches())
def test_covers_are_disjoint_convex_and_can_run(case):
    graph, matches = case
    deps = dependencies(graph)
    by_id = {match.id: match for match in matches}
    found = covers(graph, matches, preset("h200"))
    assert 1 <= len(found) <= MAX_COVERS and [cover.rank for cover in found] == list(range(len(found)))
    assert sum(cover.fusion is Fusion.FRAMEWORK for cover in found) == 1
    for cover in found:
        masks = [deps.mask(by_id[match].nodes) for match in cover.matches]
        assert sum(mask.bit_count() for mask in masks) == len({i for mask in masks for i in range(20) if mask >> i & 1})
        assert all(deps.is_convex(mask) for mask in masks) and deps.is_schedulable(masks)


@given(case=regions_with_matches())
def test_the_favourite_is_the_best_of_all_covers(case):
    graph, matches = case
    deps = dependencies(graph)
    masks = [deps.mask(match.nodes) for match in matches[:8]]

    def steps(chosen):
        """Steps and framework nodes; None if the matches overlap or cannot run."""
        union = 0
        for mask in chosen:
            if union & mask:
                return None
            union |= mask
        return 2 * len(chosen) + 6 * (len(graph.nodes) - union.bit_count()) if deps.is_schedulable(chosen) else None

    options = [[mask for i, mask in enumerate(masks) if bits >> i & 1] for bits in range(1 << len(masks))]
    best = min(cost for cost in map(steps, options) if cost is not None)
    favourite = covers(graph, matches[:8], preset("h200"))[0]
    by_id = {match.id: match for match in matches}
    assert steps([deps.mask(by_id[m].nodes) for m in favourite.matches]) == best


def test_matches_that_need_each_other_are_never_in_one_cover():
    rows = [("a1", ("x",)), ("b1", ("a1",)), ("b2", ("x",)), ("a2", ("b2",))]
    nodes = tuple(Node(name=n, op="aten.relu.default", kind="relu", args=tuple(map(Ref, ins)), outputs=(n,)) for n, ins in rows)
    values = (Value(name="x", spec=SPEC, kind=ValueKind.INPUT), *(Value(name=n, spec=SPEC) for n, _ in rows))
    graph = Graph(name="g", kind=GraphKind.FORWARD, values=values, nodes=nodes, inputs=("x",), outputs=("b1", "a2")).verify()
    pair = [Match(kind="k", label=SemanticLabel.MIXED, nodes=names, operands=()) for names in (("a1", "a2"), ("b1", "b2"))]
    found = covers(graph, pair, preset("h200"))
    assert sorted(len(cover.matches) for cover in found) == [0, 1, 1]
