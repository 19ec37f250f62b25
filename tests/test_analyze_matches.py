"""Analyze: matches that are not true are refused with a reason, and a rule that fails costs only itself."""

import pytest
from analyze_cases import SPEC, chain, context, graph_set, relu
from attrs import evolve

from agentcompile_core.errors import AgentCompileError, Cause
from agentcompile_core.ir.graph import (
    GraphKind,
)
from agentcompile_core.ir.region import Access, Match, Operand, Role, SemanticLabel
from agentcompile_core.ops.dependency import dependencies
from agentcompile_core.plugin.interfaces import RegionRule
from agentcompile_core.plugin.match_kind import MatchKind, OperandKind
from agentcompile_core.stages import analyze
from agentcompile_core.stages.analyze.checking import problem

# ---- matches


LOOSE = MatchKind(name="loose", doc="anything", labels=(SemanticLabel.ELEMENTWISE,), operands=(
    OperandKind("in", repeated=True), OperandKind("w", optional=True), OperandKind("out", (Role.OUTPUT,), optional=True)))


class Proposing(RegionRule):
    """A rule that proposes what it is told to."""

    name = "proposing"
    kinds = (LOOSE, evolve(LOOSE, name="acme_fused"))

    def __init__(self, *matches):
        self.matches = matches

    def find(self, graph, target):
        return self.matches


class Raising(RegionRule):
    name = "raising"

    def find(self, graph, target):
        yield from ()
        raise RuntimeError("broken rule")


def operand(name, role, *values):
    access = Access.WRITE if role is Role.OUTPUT else Access.READ
    return Operand(name=name, role=role, access=access, values=values, spec=SPEC)


def match(nodes, *operands, kind="loose"):
    return Match(kind=kind, label=SemanticLabel.ELEMENTWISE, nodes=nodes, operands=operands)


DIAMOND = chain(relu("n0", "x", "a"), relu("n1", "a", "b"), ("n2", "aten.add.Tensor", "add", ("a", "b"), ("c",), {}))
IN, OUT = operand("in0", Role.INPUT, "x"), operand("out", Role.OUTPUT, "c")


@pytest.mark.parametrize(("proposal", "reason"), [
    (match(("n0", "n2"), IN, operand("in1", Role.INPUT, "b"), OUT), "not convex"),
    (match(("n0",), IN), "hides 'a'"),
    (match(("n0", "n1", "n2"), OUT), "reads 'x'"),
    (match(("n0", "n1", "n2"), IN, operand("out", Role.OUTPUT, "x")), "not produced"),
    (match(("n0", "n1", "n2"), IN, operand("in1", Role.INPUT, "b"), OUT), "produced inside"),
    (match(("n0", "n1", "n2"), operand("w", Role.WEIGHT, "x"), OUT), "changes while the program runs"),
    (match(("n0", "n1", "n2"), IN, operand("w", Role.INPUT, "nothing"), OUT), "no value of the region"),
])
def test_untrue_matches_are_refused(proposal, reason):
    assert reason in problem(proposal, DIAMOND, dependencies(DIAMOND))
    ctx = context(Proposing(proposal), strict=False)
    (analysis,) = analyze.run(graph_set(DIAMOND), ctx)
    assert proposal.nodes not in [m.nodes for r in analysis.regions for m in r.matches if m.rule == "test/proposing"]
    (failure,) = ctx.catalog.failures
    assert failure.cause is Cause.CONTRACT and failure.plugin == "test/proposing" and reason in failure.message


def test_a_true_match_is_kept_with_its_rule_and_in_graph_order():
    proposal = match(("n2", "n0", "n1"), IN, OUT, kind="acme_fused")
    (analysis,) = analyze.run(graph_set(DIAMOND), context(Proposing(proposal)))
    (kept,) = [m for m in analysis.regions[0].matches if m.kind == "acme_fused"]
    assert kept.nodes == ("n0", "n1", "n2") and kept.rule == "test/proposing" and kept.id == "acme_fused:n0+3:n2"


def test_undeclared_writes_of_a_match_are_refused():
    graph = chain(("n0", "aten.relu_.default", "relu", ("x",), ("c",), {"mutates": ("x",)}))
    assert "state operand" in problem(match(("n0",), IN, OUT), graph, dependencies(graph))


@pytest.mark.parametrize("proposal", [
    "not a match", match((), IN, OUT), match(("absent",), IN, OUT), match(("n0", "n1", "n2"), IN, OUT, kind="linear")])
def test_nonsense_from_a_rule_is_a_failure_and_the_run_goes_on(proposal):
    ctx = context(Proposing(proposal), strict=False)
    (analysis,) = analyze.run(graph_set(DIAMOND), ctx)
    assert len(ctx.catalog.failures) == 1 and analysis.regions[0].matches


def test_a_raising_rule_is_a_failure_and_the_run_goes_on(decode_graphs):
    _, graph = decode_graphs.transformer(layers=1)
    ctx = context(Raising(), strict=False)
    (analysis,) = analyze.run(graph_set(graph), ctx)
    assert {f.plugin for f in ctx.catalog.failures} == {"test/raising"} and "broken rule" in ctx.catalog.failures[0].message
    assert analysis == analyze.run(graph_set(graph), context())[0]
    with pytest.raises((RuntimeError, AgentCompileError)):
        analyze.run(graph_set(graph), context(Raising(), strict=True))


def test_rules_are_asked_once_per_merged_region(decode_graphs):
    asked = []

    class Counting(RegionRule):
        name = "counting"

        def find(self, graph, target):
            asked.append(graph.name)
            return ()

    _, graph = decode_graphs.transformer(layers=3)
    analyze.run(graph_set(graph), context(Counting()))
    assert asked == ["prologue", "layer", "head"]


def test_decode_is_preferred_and_prefill_ignored(decode_graphs):
    _, graph = decode_graphs.transformer(layers=1)
    prefill = evolve(graph, name="prefill", kind=GraphKind.PREFILL)
    assert [a.graph for a in analyze.run(graph_set(prefill, graph), context())] == ["decode"]
    assert analyze.run(graph_set(prefill), context()) == ()
