"""A match kind is one value offered with its rule: a third party's gets right FLOPs, bytes, inputs, reference, label and checks."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from agentcompile_cuda_kit.targets import PRESETS
from agentcompile_rules_transformers import KINDS, agentcompile_region_rules
from agentcompile_rules_transformers import testing as cases
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import Cause, ContractError
from agentcompile_core.ir import kind_names, serial
from agentcompile_core.ir.advice import Advice, Question
from agentcompile_core.ir.candidate import Launch, StepSource, pointer
from agentcompile_core.ir.graph import DType, TensorSpec, Workload
from agentcompile_core.ir.plan import Cover, Fusion, Origin, PlanSpace, Schedule, Step
from agentcompile_core.ir.region import Access, Match, Operand, Role, SemanticLabel
from agentcompile_core.ir.selection import Basis, SelectedStep, Selection
from agentcompile_core.ir.verdict import Case, InputFamily, Outcome, Trial
from agentcompile_core.plugin.advice_json import answer_schema, question_json, read_answer
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.plugin.interfaces import RegionRule
from agentcompile_core.plugin.match_kind import WEIGHTS, AttributeKind, MatchKind, OperandKind, plain_kind
from agentcompile_core.report import selection_text
from agentcompile_core.stages.advise.advice_check import screen
from agentcompile_core.stages.analyze import analyze
from agentcompile_core.stages.analyze.checking import kind_problem
from agentcompile_core.stages.validate.input_cases import cases_for
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles
from agentcompile_core.testing.matching import matched
from agentcompile_core.worker import Job
from agentcompile_core.worker.evaluate import WorkerState
from agentcompile_core.worker.operands import make_inputs
from agentcompile_core.worker.synthetic import Synthetic
from agentcompile_core.worker.timing import roomy

ROOT = Path(__file__).parent.parent
ROWS, COLUMNS = 3, 40


def example():
    """The rule from outside that docs/writing_a_plugin.md goes through."""
    spec = importlib.util.spec_from_file_location("acme_cumulative", ROOT / "examples" / "rule_plugin" / "acme_cumulative" / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ACME = example()
KIND = ACME.CUMULATIVE_SCALE


def cumulative_graph():
    """silu, then what no kind of the project's own serves: cumsum and a multiplication by a weight."""
    draft, shape = cases.Draft(), (1, ROWS, COLUMNS)
    active = draft.one("aten.silu.default", (draft.given("x", shape, DType.F32),), shape, DType.F32)
    total = draft.one("aten.cumsum.default", (active, -1), shape, DType.F32)
    return draft.graph(draft.one("aten.mul.Tensor", (total, draft.weight("factor", COLUMNS, dtype=DType.F32)), shape, DType.F32))


def context(*extra, strict=True, only=("transformers_rules",)):
    catalog = load_catalog(only=only, strict=strict, extra=extra)
    return Context(catalog=catalog, target=PRESETS["h200"], config=Config(), store=Store(None))


@pytest.fixture(scope="module")
def analyzed():
    ctx = context(("acme", ACME))
    analysis = analyze(cumulative_graph(), ctx)
    (region,), (summary,) = analysis.regions, analysis.summaries
    match = next(m for m in region.matches if m.kind == KIND.name)
    return ctx, region, summary, match


# ---- a third party's kind, from analyze to explain


def test_analyze_counts_its_work(analyzed):
    _, _, summary, match = analyzed
    (found,) = [m for m in summary.matches if m.kind == KIND.name]
    assert found.flops == 2 * ROWS * COLUMNS  # an addition and a multiplication per element
    assert found.bytes == match.bytes_moved == 4 * (2 * ROWS * COLUMNS + COLUMNS)
    assert found.reduction_axis == -1 and found.label == "cumulative_scale" and not summary.dynamic_shapes


def test_it_is_found_in_a_module_as_it_is_captured():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.factor = torch.nn.Linear(16, COLUMNS), torch.nn.Parameter(torch.randn(COLUMNS))

        def forward(self, x):
            return self.layer(x).cumsum(-1) * self.factor

    ctx, model = context(("acme", ACME)), Model().eval()
    frontend = next(f for f in ctx.catalog.frontends.values() if f.accepts(model))
    graphs = frontend.capture(frontend.load(model, {"example_inputs": (torch.randn(1, 16),)}), Workload(dtype=DType.F32, max_context=16))
    (summary,) = analyze(graphs.graphs[0], ctx).summaries
    assert {m.kind: m.flops for m in summary.matches} == {
        "linear": 2 * 16 * COLUMNS + COLUMNS, "cumulative_scale": 2 * COLUMNS, "elementwise": COLUMNS}


def test_inputs_are_drawn_as_the_kind_says(analyzed):
    _, _, _, match = analyzed
    tried = cases_for(match, KIND, "seed", emulated=True)
    assert {case.family for case in tried} >= {"drift", *map(str, InputFamily)}
    assert {case.position for case in tried} == {0}
    drift = make_inputs(match, KIND, next(c for c in tried if c.family == "drift"), "cpu")
    normal = make_inputs(match, KIND, next(c for c in tried if c.family == "normal"), "cpu")
    assert (drift["x"] >= 0).all() and (normal["x"] < 0).any()
    assert set(drift) == {"x", "factor"} and drift["x"].shape == (1, ROWS, COLUMNS)
    assert normal["factor"].abs().max() < 1.0  # a vector of weights


class Cumulative(doubles.FakeBackend):
    """Computes what the example's kind means, or what its text says instead."""

    name = "cumulative"

    def prepare(self, handle, launch, arguments, pdl):
        x, factor, out = (doubles._floats(int(a), n) for a, n in zip(arguments, (ROWS * COLUMNS, COLUMNS, ROWS * COLUMNS), strict=True))

        def run(stream):
            for row in range(ROWS):
                total = 0.0
                for column in range(COLUMNS):
                    total = x[row * COLUMNS + column] + (0.0 if "behave=forgets" in handle and column == 32 else total)
                    out[row * COLUMNS + column] = total * factor[column]

        return run


@pytest.mark.parametrize(("behaviour", "passes"), [("honest", True), ("forgets", False)])
def test_a_kernel_of_it_is_judged_by_the_kinds_reference(analyzed, behaviour, passes):
    ctx, region, _, match = analyzed
    shelf = ctx.catalog.offers
    shelf["agentcompile_backends"]["test/cumulative"] = Cumulative()
    shelf["agentcompile_validators"]["test/simple"] = doubles.SimpleValidator()
    arguments = (pointer("x", Role.INPUT, DType.F32), pointer("factor", Role.WEIGHT, DType.F32),
                 pointer("out", Role.OUTPUT, DType.F32, Access.WRITE))
    launch = Launch(entry="k", grid=(1, 1, 1), block=(32, 1, 1), arguments=arguments)
    source = StepSource(digest=f"c0de{behaviour}", code=f"behave={behaviour}", launches=(launch,), reduction_depth=COLUMNS)
    trial = Trial(match=match, graph=region.graph.sub(match.nodes, match.id, match.need("out").values), source=source,
                  target=PRESETS["h200"], cases=cases_for(match, KIND, "seed", emulated=True))
    job = Job(trial=serial.loads(serial.dumps(trial), Trial), step=step(match), backend="cumulative", validators=("simple",), time=False)
    session = WorkerState(ctx.catalog)
    found = session.evaluate(job, session.build(job), lambda phase: None)
    assert (found.failure is None) is passes, found.message
    if passes:
        assert "drift" in [check.name for check in found.verdicts[0].checks]
    else:
        assert found.failure is Cause.TOLERANCE


def step(match):
    return Step(match_id=match.id, implementation="acme/cumulative", origin=Origin.GENERATED, schedule=Schedule({}))


def test_an_advisor_may_use_its_label_and_no_other_new_one(analyzed):
    _, region, summary, _ = analyzed
    question = Question(summary=summary, space=PlanSpace(signature=region.signature, steps=(), covers=(), rejects=()), target="h200")
    assert question.labels == (*map(str, SemanticLabel), "cumulative_scale")
    assert answer_schema(question.labels)["properties"]["label"]["anyOf"][0]["enum"] == list(question.labels)
    assert question_json(question)["region"]["labels"] == ["cumulative_scale"]
    answer = read_answer('{"label": "cumulative_scale"}', question.space, question.labels)
    assert screen(answer, question)[0].label == "cumulative_scale" and not answer.refused
    assert read_answer('{"label": "made_up"}', question.space, question.labels).refused[0].rule == "J3"
    accepted, refused = screen(Advice(label="made_up"), question)
    assert accepted.label is None and [item.rule for item in refused] == ["A8"]
    elsewhere = evolve(question, summary=evolve(summary, labels=()))
    assert screen(Advice(label="cumulative_scale"), elsewhere)[0].label is None


def test_explain_shows_its_label_and_bundles_keep_it(analyzed):
    _, region, _, match = analyzed
    chosen = SelectedStep(step=step(match), label=match.label, nodes=match.nodes, source=None, basis=Basis.MEASURED)
    selection = Selection(signature=region.signature, region=region.name, cover=Cover(matches=(match.id,), fusion=Fusion.FULL, rank=0),
                          steps=(chosen,), basis=Basis.MEASURED)
    again = serial.loads(serial.dumps(selection), Selection)
    assert again == selection and '"label":"cumulative_scale"' in serial.dumps(selection)
    assert "cumulative_scale" in selection_text(again)


# ---- what is refused


def plugin(*rules):
    class Plugin:
        @hookimpl
        def agentcompile_region_rules(self):
            return rules

    return Plugin()


class Silent(RegionRule):
    """Offers kinds, and finds what it is told to."""

    def __init__(self, name, *kinds, found=()):
        self.name, self.kinds, self.found = name, kinds, found

    def find(self, graph, target):
        return self.found


def test_two_plugins_with_different_kinds_of_one_name_are_both_named():
    mine, theirs = (MatchKind(name="twin", doc=doc, operands=()) for doc in ("mine", "theirs"))
    plugins = [("one", plugin(Silent("a", mine), Silent("b", mine))), ("two", plugin(Silent("c", theirs)))]
    catalog = load_catalog(only=(), strict=False, extra=plugins)
    assert set(catalog.region_rules) == {"one/a", "one/b"} and catalog.kind("twin") is mine
    (failure,) = catalog.failures
    assert failure.plugin == "two" and all(text in failure.message for text in ("two/c", "one/a", "'twin'"))


def test_kinds_that_are_no_kinds_are_refused():
    catalog = load_catalog(only=(), strict=False, extra=[("one", plugin(Silent("a", "linear")))])
    assert not catalog.region_rules and "expected MatchKind" in catalog.failures[0].message


def test_a_match_of_a_kind_that_nobody_offers_is_refused_with_a_reason():
    graph = cumulative_graph()
    match, _ = matched(ACME.CumulativeRule(), graph)
    ctx = context(("acme", plugin(Silent("orphan", found=(match,)))), strict=False)
    analysis = analyze(graph, ctx)
    assert KIND.name not in {m.kind for region in analysis.regions for m in region.matches}
    (failure,) = ctx.catalog.failures
    assert failure.plugin == "acme/orphan" and failure.cause is Cause.CONTRACT
    assert "no installed region rule offers the match kind 'cumulative_scale'" in failure.message
    with pytest.raises(ContractError, match="offered: argmax, attention"):
        ctx.catalog.kind("cumulative_scale")


CORE = {
    "linear": cases.linear_case(n=48, k=32, norm="layer", bias=True, residual=True), "gated": cases.gated_case(n=40, k=32),
    "norm": cases.norm_case(columns=64, residual=True), "gather": cases.gather_case(columns=8, vocabulary=9, rows=2),
    "elementwise": cases.elementwise_case(columns=16), "rope": cases.rope_case(heads=2, head_dim=16),
    "table": cases.rope_table_case(half=8),
    "attention": cases.attention_case(heads=(4, 2), head_dim=16, capacity=64, rope="rms", window=16),
    "argmax": cases.argmax_case(n=33, advance=True),
}
BY_NAME = {kind.name: kind for kind in KINDS}


def broken(match: Match, draw) -> Match:
    """The match with one thing wrong."""
    kind = BY_NAME[match.kind]
    operands, attributes = list(match.operands), list(match.attributes)
    how = draw(st.sampled_from(("missing", "unknown", "role", "twice", "attribute missing", "attribute unknown", "attribute type",
                                "label")))
    needed = [i for i, o in enumerate(operands) if not (kind.operand(o.name).optional or kind.operand(o.name).repeated)]
    at = draw(st.sampled_from(range(len(operands))))
    which = draw(st.sampled_from([i for i, (name, _) in enumerate(attributes) if name not in ("style", "unread_bytes")]))
    if how == "missing":
        del operands[draw(st.sampled_from(needed))]
    elif how == "unknown":
        operands[at] = evolve(operands[at], name="stranger")
    elif how == "role":
        wrong = [role for role in Role if role not in kind.operand(operands[at].name).roles]
        operands[at] = evolve(operands[at], role=draw(st.sampled_from(wrong)))
    elif how == "twice":
        operands.append(operands[at])
    elif how == "attribute missing":
        required = [i for i, (n, _) in enumerate(attributes) if kind.attribute(n).default is None and not kind.attribute(n).repeated]
        del attributes[draw(st.sampled_from(required))]
    elif how == "attribute unknown":
        attributes.append(("stranger", 1))
    elif how == "attribute type":
        attributes[which] = (attributes[which][0], (1.5,) if draw(st.booleans()) else None)
    else:
        return evolve(match, label="stranger")
    return evolve(match, operands=tuple(operands), attributes=tuple(attributes))


@given(name=st.sampled_from(sorted(CORE)), data=st.data())
def test_a_match_that_is_not_what_its_kind_says_is_refused(name, data):
    match, _ = CORE[name]
    assert kind_problem(match, BY_NAME[match.kind]) == ""
    assert kind_problem(broken(match, data.draw), BY_NAME[match.kind]) != ""


def test_defaults_of_a_kind_are_filled_in_and_its_own_count_of_bytes_is_kept():
    class Halved(MatchKind):
        def bytes_moved(self, match, graph):
            return match.bytes_moved // 2

    kind = Halved(name="cumulative_scale", doc="", operands=KIND.operands, attributes=(*KIND.attributes, AttributeKind("steps", int, 7)))
    graph = cumulative_graph()
    plain, _ = matched(ACME.CumulativeRule(), graph)
    match, _ = matched(Silent("halved", kind, found=(plain,)), graph)
    assert match.integer("steps") == 7 and match.bytes_moved == plain.bytes_moved // 2
    assert serial.loads(serial.dumps(match), Match) == match


@pytest.mark.parametrize(("method", "answer"), [
    ("flops", None), ("flops", -1), ("bytes_moved", 1.5), ("positions", (0, -3)), ("positions", ("far",)),
    ("reduction_axis", ValueError("no"))])
def test_a_kind_that_counts_nonsense_costs_its_matches_and_not_the_run(method, answer):
    def asked(self, *_):
        if isinstance(answer, Exception):
            raise answer
        return answer

    kind = type("Odd", (MatchKind,), {method: asked})(name=KIND.name, doc="", operands=KIND.operands, attributes=KIND.attributes)
    graph = cumulative_graph()
    plain, _ = matched(ACME.CumulativeRule(), graph)
    ctx = context(("odd", plugin(Silent("odd", kind, found=(plain,)))), strict=False)
    analysis = analyze(graph, ctx)
    assert {m.kind for region in analysis.regions for m in region.matches} == {"elementwise"}
    assert [f.plugin for f in ctx.catalog.failures] == ["odd/odd"]


# ---- what a kind need not say


@pytest.mark.parametrize(("op", "given", "result", "flops", "axis"), [
    ("aten.linear.default", ((2, 8), (5, 8)), (2, 5), 2 * 2 * 5 * 8, -1),
    ("aten.addmm.default", ((5,), (2, 8), (8, 5)), (2, 5), 2 * 2 * 5 * 8 + 10, -1),
    ("aten.bmm.default", ((3, 2, 8), (3, 8, 5)), (3, 2, 5), 2 * 30 * 8, -1),
    ("aten.convolution.default", ((1, 3, 8, 8), (4, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
     (1, 4, 6, 6), 2 * 144 * 27, -3),
    ("aten.sum.dim_IntList", ((4, 6), [0]), (6,), 24, -2),
    ("aten.cumsum.default", ((4, 6), 1), (4, 6), 24, -1),
    ("aten.tanh.default", ((4, 6),), (4, 6), 24, 0),
    ("aten.flip.default", ((4, 6), [0]), (4, 6), 0, 0),
    ("aten.atan2.default", ((4, 6), (4, 6)), (4, 6), 24, 0),
])
def test_work_is_counted_from_the_operators(op, given, result, flops, axis):
    draft = cases.Draft()
    literal = {i: tuple(s) if isinstance(s, list) else s for i, s in enumerate(given) if not isinstance(s, tuple)}
    args = tuple(literal[i] if i in literal else draft.given(f"x{i}", s, DType.F32) for i, s in enumerate(given))
    graph = draft.graph(draft.one(op, args, result, DType.F32))
    match = Match(kind="some", label="some", nodes=(graph.nodes[0].name,), operands=())
    kind = plain_kind("some")
    assert (kind.flops(match, graph), kind.reduction_axis(match, graph)) == (flops, axis)


def spec(*shape, dtype=DType.F32):
    return TensorSpec(shape=shape, dtype=dtype)


CACHE = MatchKind(name="cached", doc="", operands=(
    OperandKind("at", (Role.LENGTH,)), OperandKind("ids", (Role.INPUT,), index_of="table"), OperandKind("table", WEIGHTS),
    OperandKind("cache", (Role.STATE,), filled_along=1), OperandKind("log", (Role.STATE,), grows=True)))


def cached(capacity, rows):
    specs = (("at", Role.LENGTH, spec(1, dtype=DType.I64)), ("ids", Role.INPUT, spec(50, dtype=DType.I64)),
             ("table", Role.WEIGHT, spec(rows, 4)),
             ("cache", Role.STATE, spec(1, capacity, 2)), ("log", Role.STATE, spec(capacity, dtype=DType.I64)))
    return Match(kind="cached", label="cached", nodes=("n",), operands=tuple(
        Operand(name=n, role=r, access=Access.READ, values=(n,), spec=s) for n, r, s in specs))


@given(capacity=st.integers(2, 5000), rows=st.integers(1, 9), emulated=st.booleans(), seed=st.integers(0, 99))
def test_positions_indices_and_states_stay_inside_what_they_point_into(capacity, rows, emulated, seed):
    match = cached(capacity, rows)
    positions = CACHE.positions(match, emulated)
    assert all(0 <= p < capacity for p in positions) and {0, 1} <= set(positions)
    assert emulated or capacity - 1 in positions
    made = make_inputs(match, CACHE, Case(family="normal", seed=seed, position=positions[seed % len(positions)]), "cpu")
    at = int(made["at"])
    assert int(made["ids"].min()) >= 0 and int(made["ids"].max()) < rows
    assert not made["cache"][:, :at].isnan().any() and made["cache"][:, at:].isnan().all()
    without = evolve(match, operands=match.operands[1:])
    assert CACHE.positions(without, emulated) == (0,)


def test_states_that_grow_get_room_and_others_do_not():
    trial = roomy(Trial(match=cached(8, 2), graph=None, source=None, target=None, cases=()), CACHE)
    assert trial.match.need("log").spec.numel > 8 and trial.match.need("cache").spec.numel == 16


def test_a_kind_that_makes_the_wrong_shape_is_told_so(analyzed):
    _, _, _, match = analyzed

    class Wrong(MatchKind):
        def make(self, match, operand, case, generator, device):
            return torch.zeros(3)

    with pytest.raises(ContractError, match=r"kind cumulative_scale made \(3,\) for operand x, which is \(1, 3, 40\)"):
        make_inputs(match, Wrong(name="cumulative_scale", doc="", operands=KIND.operands), Case(family="normal", seed=1), "cpu")


def test_weights_have_the_scale_of_trained_ones():
    match, _ = cases.linear_case(n=64, k=1024, norm="rms")
    made = make_inputs(match, BY_NAME["linear"], Case(family="normal", seed=3), "cpu")
    assert float(made["weight"].float().std()) == pytest.approx(1024**-0.5, rel=0.05)
    assert float(made["norm_weight"].float().mean()) == pytest.approx(1.0, abs=0.05)
    one_plus = evolve(match, attributes=tuple((n, "rms_one_plus" if n == "norm" else v) for n, v in match.attributes))
    assert float(make_inputs(one_plus, BY_NAME["linear"], Case(family="normal", seed=3), "cpu")["norm_weight"].float().mean()) < 0.5


def test_a_synthetic_step_asks_the_kinds(decode_graphs):
    _, graph = decode_graphs.transformer(layers=2)
    ctx = context()
    step = SimpleNamespace(graph=graph, regions=analyze(graph, ctx).regions, position=5)
    made = Synthetic(step, ctx.catalog.kinds, "cpu").tensors(tuple({v.kind for v in graph.values}), by_source=False)
    frequencies = next(t for name, t in made.items() if "inv_freq" in name)
    assert (frequencies > 0).all() and (frequencies.diff() < 0).all()
    grown = [name for name, tensor in made.items() if tensor.numel() > graph.spec(name).numel]
    assert len(grown) == 1 and "history" in grown[0]


# ---- the core knows no kind


def test_the_core_names_no_kind_outside_the_list_of_names():
    words = "|".join(value.upper() for name, value in vars(kind_names).items() if name.isupper())
    pattern = re.compile(rf"\bkind\s*(?:==|!=|in)\s*\(?(?:kinds?\.|kind_names\.)?(?:{words})\b|kind_names import")
    core = [p for p in (ROOT / "agentcompile_core").rglob("*.py") if p.name != "plugin_api.py"]  # which hands the names on
    assert len(core) > 100 and [str(p) for p in core if pattern.search(p.read_text())] == []


def test_every_rule_offers_the_kinds_that_it_finds(decode_graphs):
    _, graph = decode_graphs.transformer(layers=1, qk_norm=False, fused=True, bias=True)
    for rule in agentcompile_region_rules():
        found = {match.kind for match in rule.find(graph, PRESETS["h200"])}
        assert found <= {kind.name for kind in rule.kinds}
        assert all(kind.doc and all(o.roles for o in kind.operands) for kind in rule.kinds)


@pytest.mark.parametrize("text", ["", "Gemv", "a-b", "1st", "x" * 65, "two words"])
def test_words_of_open_vocabularies_are_lower_snake_case(text):
    for make in (lambda: Match(kind="k", label=text, nodes=("n",), operands=()), lambda: Case(family=text, seed=1),
                 lambda: Advice(label=text), lambda: MatchKind(name="k", doc="", operands=(), labels=(text,))):
        with pytest.raises(ValueError, match="lower_snake_case"):
            make()


def test_outcomes_are_as_before_in_json():
    match, _ = cases.norm_case(columns=8)
    assert serial.unstructure(match)["label"] == "norm" and serial.unstructure(Case(family=InputFamily.SPIKY, seed=1))["family"] == "spiky"
    assert serial.loads(serial.dumps(match), Match) == match and Outcome.PASS.value == "pass"
