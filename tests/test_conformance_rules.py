"""The kits for rules and validators: planted defects are refused for their reason, good offers pass."""

import itertools
from typing import Any

import pytest
import torch
from agentcompile_rules_transformers.testing import Draft
from attrs import evolve
from planted import refused

from agentcompile_core.errors import Cause
from agentcompile_core.ir.graph import DType, Graph
from agentcompile_core.ir.region import Access, Match, Role
from agentcompile_core.ir.verdict import Outcome, Verdict
from agentcompile_core.ops.reference import Bounded
from agentcompile_core.ops.region_view import RegionView
from agentcompile_core.plugin.interfaces import RegionRule
from agentcompile_core.plugin.match_kind import AttributeKind, MatchKind, OperandKind
from agentcompile_core.testing.doubles import PickyValidator, SimpleValidator, fake_trial
from agentcompile_core.testing.rule_conformance import RegionRuleConformance
from agentcompile_core.testing.validator_conformance import ValidatorConformance

# ---- rules


def flips(count: int = 24, op: str = "aten.flip.default") -> Graph:
    draft = Draft()
    args = (draft.given("x", (1, count), DType.F32), (-1,))
    return draft.graph(draft.one(op, args, (1, count), DType.F32))


FLIP = MatchKind(name="flip", doc="out = x backwards", operands=(OperandKind("x", (Role.INPUT,)), OperandKind("out", (Role.OUTPUT,))),
                 attributes=(AttributeKind("columns"),))


class Flip(MatchKind):
    loose = False

    def reference(self, match: Match, graph: Graph, values: Any, depth: int) -> dict[str, Bounded]:
        value = values[match.need("x").values[0]].double().flip(-1)
        return {match.need("out").values[0]: Bounded(value, torch.full_like(value, 100.0 if self.loose else 0.0))}


class Loose(Flip):
    loose = True


class Lying(Flip):
    def reference(self, match: Match, graph: Graph, values: Any, depth: int) -> dict[str, Bounded]:
        (name, bound), = super().reference(match, graph, values, depth).items()
        return {name: Bounded(bound.value + 1.0, bound.error)}


def kind(cls: type[MatchKind] = Flip, **changed: Any) -> MatchKind:
    return cls(**{"name": "flip", "doc": FLIP.doc, "operands": FLIP.operands, "attributes": FLIP.attributes, **changed})


class FlipRule(RegionRule):
    name = "flip"
    kinds = (kind(),)

    def matches(self, graph: Graph, view: RegionView, node: Any) -> Match:
        operands = (view.read("x", node.inputs[0]), view.write("out", node.outputs[0]))
        return Match(kind="flip", label="flip", nodes=(node.name,), operands=operands, attributes=(("columns", 24),))

    def find(self, graph, target):
        view = RegionView(graph=graph)
        return [self.matches(graph, view, node) for node in graph.nodes if node.kind == "flip"]


class NamesNoOutput(FlipRule):
    def matches(self, graph, view, node):
        match = super().matches(graph, view, node)
        return evolve(match, operands=match.operands[:1])


class WrongSize(FlipRule):
    def matches(self, graph, view, node):
        match = super().matches(graph, view, node)
        x, out = match.operands
        return evolve(match, operands=(evolve(x, spec=evolve(x.spec, shape=(1, 12))), out))


class WrongType(FlipRule):
    def matches(self, graph, view, node):
        match = super().matches(graph, view, node)
        x, out = match.operands
        return evolve(match, operands=(evolve(x, spec=evolve(x.spec, dtype=DType.F16)), out))


class WritesInput(FlipRule):
    def matches(self, graph, view, node):
        match = super().matches(graph, view, node)
        x, out = match.operands
        return evolve(match, operands=(evolve(x, access=Access.READ_WRITE), out))


class Restless(FlipRule):
    turn = itertools.count()

    def matches(self, graph, view, node):
        return evolve(super().matches(graph, view, node), attributes=(("columns", next(self.turn)),))


class Greedy(FlipRule):
    def find(self, graph, target):
        view = RegionView(graph=graph)
        return [self.matches(graph, view, node) for node in graph.nodes]


class Careless(FlipRule):
    def find(self, graph, target):
        assert graph.nodes[0].kind
        return super().find(graph, target)


class GoodRule(RegionRuleConformance):
    rule, graphs = FlipRule(), (flips(),)


def with_kind(rule: type[FlipRule], one: MatchKind) -> RegionRule:
    return type(rule.__name__, (rule,), {"kinds": (one,)})()


@pytest.mark.parametrize("rule,test,reason", [
    (with_kind(FlipRule, kind(name="flop")), "test_matches_are_accepted_by_the_core", "offers no kind 'flip'"),
    (type("None", (FlipRule,), {"kinds": ()})(), "test_kinds_are_complete", "offers no kinds"),
    (type("Twice", (FlipRule,), {"kinds": (kind(), kind())})(), "test_kinds_are_complete", "two kinds are called 'flip'"),
    (with_kind(FlipRule, kind(doc=" ")), "test_kinds_are_complete", "has no doc"),
    (with_kind(FlipRule, kind(operands=FLIP.operands[:1])), "test_kinds_are_complete", "writes nothing"),
    (with_kind(FlipRule, kind(operands=(*FLIP.operands, OperandKind("i", index_of="table")))), "test_kinds_are_complete",
     "i indexes 'table', which is no operand"),
    (NamesNoOutput(), "test_matches_are_accepted_by_the_core", "operand 'out' is missing"),
    (WrongSize(), "test_operands_tell_the_truth", "operand x has 12 elements; its values have 24"),
    (WrongType(), "test_operands_tell_the_truth", "operand x is float16; its values are float32"),
    (WritesInput(), "test_operands_tell_the_truth", "role input and is written"),
    (Restless(), "test_finding_is_repeatable_and_changes_nothing", "other matches the second time"),
    (Careless(), "test_odd_graphs_are_left_alone", "find\\(\\) raised IndexError"),
    (Greedy(), "test_odd_graphs_are_left_alone", "where it serves nothing"),
    (with_kind(FlipRule, kind(Lying)), "test_references_judge_rightly", "refuses the framework's own result"),
    (with_kind(FlipRule, kind(Loose)), "test_references_judge_rightly", "passes a result that is off by a tenth"),
], ids=lambda value: type(value).__name__ if isinstance(value, RegionRule) else "")
def test_defects_of_rules_are_refused(rule: RegionRule, test: str, reason: str) -> None:
    refused(GoodRule, test, reason, rule=rule)


def test_a_rule_that_finds_what_it_does_not_serve_is_refused() -> None:
    refused(GoodRule, "test_odd_graphs_are_left_alone", "found flip", unserved=(flips(7),))


class TestGoodRule(GoodRule):
    pass


# ---- validators


class NoControls(SimpleValidator):
    def controls(self, backend):
        return (), ()


class Blind(SimpleValidator):
    """Sees no damage outside of its outputs."""

    def check(self, trial, run):
        return Verdict(validator=self.name, outcome=Outcome.PASS)


class Mute(SimpleValidator):
    def check(self, trial, run):
        verdict = super().check(trial, run)
        return verdict if verdict.passed else evolve(verdict, message="no")


class NoCause(SimpleValidator):
    def check(self, trial, run):
        return evolve(super().check(trial, run), cause=None)


class Meddling(SimpleValidator):
    def check(self, trial, run):
        run.run(trial.cases[0], 0.0).inputs["in0"].zero_()
        return super().check(trial, run)


class Moody(SimpleValidator):
    turn = itertools.count()

    def check(self, trial, run):
        verdict = super().check(trial, run)
        cause = None if verdict.passed else list(type(verdict.cause))[next(self.turn) % 2]
        return evolve(verdict, cause=cause)


class Strict(SimpleValidator):
    def check(self, trial, run):
        verdict = super().check(trial, run)
        return evolve(verdict, outcome=Outcome.FAIL, cause=Cause.TOLERANCE, message="never good enough")


class Lazy(SimpleValidator):
    def applies(self, trial):
        return False


class Vague(SimpleValidator):
    def applies(self, trial):
        return 1


class Controlled(SimpleValidator):
    def controls(self, backend):
        return (fake_trial("honest"),), (fake_trial("wrong"), fake_trial("unwritten"))


class GoodValidator(ValidatorConformance):
    validator = Controlled()


def controlled(defect: type[SimpleValidator]) -> SimpleValidator:
    return type(defect.__name__, (defect,), {"controls": Controlled.controls})()


@pytest.mark.parametrize("validator,test,reason", [
    (NoControls(), "test_controls_are_judged_rightly", "needs a good and a bad trial"),
    (controlled(Blind), "test_controls_are_judged_rightly", "is bad but passed"),
    (controlled(Strict), "test_controls_are_judged_rightly", "is good but failed"),
    (controlled(Lazy), "test_controls_are_judged_rightly", "is bad but passed"),
    (controlled(Mute), "test_bad_trials_are_refused_for_a_reason", "message 'no' says too little"),
    (controlled(NoCause), "test_bad_trials_are_refused_for_a_reason", "names no cause"),
    (controlled(Meddling), "test_what_it_is_given_is_left_as_it_was", "changed input in0"),
    (controlled(Moody), "test_verdicts_are_repeatable", "the second time"),
], ids=lambda value: type(value).__name__ if isinstance(value, SimpleValidator) else "")
def test_defects_of_validators_are_refused(validator: SimpleValidator, test: str, reason: str) -> None:
    refused(GoodValidator, test, reason, validator=validator)


def test_a_validator_that_does_not_say_whether_it_applies_is_refused() -> None:
    with pytest.raises(AssertionError, match="applies\\(\\) returned 1"):
        type("Kit", (GoodValidator,), {"validator": controlled(Vague)})().test_good_trials_pass()


def test_what_a_validator_of_sources_lets_through_is_refused() -> None:
    with pytest.raises(AssertionError, match="is bad but passed"):
        type("Kit", (GoodValidator,), {"validator": PickyValidator()})().test_bad_trials_are_refused_for_a_reason()


class TestGoodValidator(GoodValidator):
    pass
