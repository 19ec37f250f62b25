"""A match kind is one value offered with its rule: a third party's gets right FLOPs, bytes, inputs, reference, label and checks."""

import importlib.util
from pathlib import Path

import pytest
import torch
from agentcompile_cuda_kit.targets import PRESETS
from agentcompile_rules_transformers import testing as cases
from attrs import evolve
from kind_cases import context

from agentcompile_core.errors import Cause, ContractError
from agentcompile_core.ir import serial
from agentcompile_core.ir.advice import Advice, Question
from agentcompile_core.ir.candidate import Launch, StepSource, pointer
from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.ir.plan import Cover, Fusion, Origin, PlanSpace, Schedule, Step
from agentcompile_core.ir.region import Access, Match, Role, SemanticLabel
from agentcompile_core.ir.selection import Basis, SelectedStep, Selection
from agentcompile_core.ir.verdict import Case, InputFamily, Trial
from agentcompile_core.plugin.advice_json import answer_schema, question_json, read_answer
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.plugin.interfaces import RegionRule
from agentcompile_core.plugin.match_kind import AttributeKind, MatchKind
from agentcompile_core.report import selection_text
from agentcompile_core.stages.advise.advice_check import screen
from agentcompile_core.stages.analyze import analyze
from agentcompile_core.stages.validate.input_cases import cases_for
from agentcompile_core.testing import doubles
from agentcompile_core.testing.fake_kernels import floats
from agentcompile_core.testing.matching import matched
from agentcompile_core.worker import Job
from agentcompile_core.worker.evaluate import WorkerState
from agentcompile_core.worker.operands import make_inputs

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
    """silu, then what no kind of the project's own takes as one: cumsum and a multiplication by a weight."""
    draft, shape = cases.Draft(), (1, ROWS, COLUMNS)
    active = draft.one("aten.silu.default", (draft.given("x", shape, DType.F32),), shape, DType.F32)
    total = draft.one("aten.cumsum.default", (active, -1), shape, DType.F32)
    return draft.graph(draft.one("aten.mul.Tensor", (total, draft.weight("factor", COLUMNS, dtype=DType.F32)), shape, DType.F32))


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
        "linear": 2 * 16 * COLUMNS + COLUMNS, "cumulative_scale": 2 * COLUMNS, "elementwise": COLUMNS, "scan": COLUMNS}


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

    def prepare_launch(self, handle, launch, arguments, pdl):
        if len(arguments) == 4:  # the addition by which the validator shows that it works
            return super().prepare_launch(handle, launch, arguments, pdl)
        x, factor, out = (floats(int(a), n) for a, n in zip(arguments, (ROWS * COLUMNS, COLUMNS, ROWS * COLUMNS), strict=True))

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
    assert set(question.labels) == {*map(str, SemanticLabel), "cumulative_scale", "scan"}
    assert answer_schema(question.labels)["properties"]["label"]["anyOf"][0]["enum"] == list(question.labels)
    assert question_json(question)["region"]["labels"] == ["cumulative_scale", "scan"]
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
    assert {m.kind for region in analysis.regions for m in region.matches} == {"elementwise", "scan"}
    assert [f.plugin for f in ctx.catalog.failures] == ["odd/odd"]


def test_a_kind_that_makes_the_wrong_shape_is_told_so(analyzed):
    _, _, _, match = analyzed

    class Wrong(MatchKind):
        def make(self, match, operand, case, generator, device):
            return torch.zeros(3)

    with pytest.raises(ContractError, match=r"kind cumulative_scale made \(3,\) for operand x, which is \(1, 3, 40\)"):
        make_inputs(match, Wrong(name="cumulative_scale", doc="", operands=KIND.operands), Case(family="normal", seed=1), "cpu")
