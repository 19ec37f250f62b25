"""The test that every region rule passes: subclass, give graphs, run pytest.

    class TestMine(RegionRuleConformance):
        rule = MyRule()
        graphs = (a_graph_with_my_operators,)
        unserved = (a_graph_of_another_shape,)
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

from attrs import evolve

from ..ir import serial
from ..ir.graph import Graph, Node
from ..ir.region import Access, Match, Operand, Role
from ..ir.target import Target
from ..ops.dependency import dependencies
from ..plugin.interfaces import RegionRule
from ..plugin.match_kind import MatchKind
from ..stages.analyze.checking import completed, kind_problem, normalized, problem
from .demands import demand, demand_identity
from .doubles import FakeBackend, fake_trial
from .tried import call_trial, framework_call, misjudged, off_by_a_tenth, run_call, what_raised

UNKNOWN = "acme_unheard_of"  # an operator that no rule serves


class RegionRuleConformance:
    """Subclass as ``class Test...``: ``rule``, ``graphs`` in which it finds something, graphs that it leaves ``unserved``.

    ``cases`` input cases of each match are run on the framework and compared with the reference of its kind.
    """

    rule: ClassVar[RegionRule]
    graphs: ClassVar[Sequence[Graph]]
    unserved: ClassVar[Sequence[Graph]] = ()
    target: ClassVar[Target] = fake_trial("honest").target
    cases: ClassVar[int] = 2

    def test_identity(self) -> None:
        """It is a RegionRule with a name and a version, and there is something to try it on."""
        demand_identity(self.rule, RegionRule)
        demand(len(self.graphs) > 0, "graphs is empty; give at least one graph in which the rule finds something")

    def test_kinds_are_complete(self) -> None:
        """Its kinds have names of their own, a meaning, something that is written, and name only operands that they have."""
        names = [kind.name for kind in self.rule.kinds]
        demand(len(names) > 0, f"rule {self.rule.name} offers no kinds; every match needs one")
        demand(len(set(names)) == len(names), f"two kinds are called {next((n for n in names if names.count(n) > 1), '')!r}")
        for kind in self.rule.kinds:
            demand(bool(kind.doc.strip()), f"kind {kind.name} has no doc; say what its matches compute")
            written = [o for o in kind.operands if {Role.OUTPUT, Role.STATE}.intersection(o.roles)]
            demand(bool(written), f"kind {kind.name} writes nothing; give it an operand of role OUTPUT or STATE")
            for operand in kind.operands:
                known = not operand.index_of or kind.operand(operand.index_of) is not None
                demand(known, f"kind {kind.name}: {operand.name} indexes {operand.index_of!r}, which is no operand of it")

    def test_matches_are_accepted_by_the_core(self) -> None:
        """Every match is convex, hides nothing that others read, writes what it says, and is what its kind says."""
        for graph in self.graphs:
            deps, found = dependencies(graph), tuple(self.rule.find(graph, self.target))
            demand(len(found) > 0, f"{self.rule.name} finds nothing in {graph.name}")
            for match in found:
                kind = self._kind(match)
                why = kind_problem(match, kind) or problem(normalized(match, deps, self.rule.name), graph, deps)
                demand(not why, f"{match.id}: {why}")
                raised = what_raised(partial(completed, match, kind, graph))
                demand(not raised, f"{match.id}: its kind cannot count it: {raised}")

    def test_operands_tell_the_truth(self) -> None:
        """Operands have the size and type of the values behind them, and the access that their role allows."""
        for match, graph in self._matches():
            for operand in match.operands:
                _truthful(match, operand, graph)

    def test_finding_is_repeatable_and_changes_nothing(self) -> None:
        """The same graph gives the same matches, and is the same graph afterwards."""
        for graph in (*self.graphs, *self.unserved):
            before = serial.digest(graph)
            first, second = (tuple(self.rule.find(graph, self.target)) for _ in range(2))
            demand(first == second, f"{graph.name}: find() gave other matches the second time; it must depend on its arguments alone")
            demand(serial.digest(graph) == before, f"{graph.name}: find() changed the graph")

    def test_odd_graphs_are_left_alone(self) -> None:
        """It finds nothing, and raises nothing, in an empty graph, among unknown operators, and in what it does not serve."""
        for graph in (*(odd for given in self.graphs for odd in _odd(given)), *self.unserved):
            found: list[Match] = []
            raised = what_raised(partial(self._find_into, found, graph))
            demand(not raised, f"{graph.name}: find() raised {raised}; look before you match")
            demand(not found, f"{graph.name}: it found {found[0].id if found else ''}, where it serves nothing")

    def test_references_judge_rightly(self) -> None:
        """The framework's own result meets the reference of its kind; one that is off by a tenth does not."""
        backend = FakeBackend()
        for found, graph in self._matches():
            kind = self._kind(found)
            match = completed(found, kind, graph)
            outputs = tuple(value for operand in match.operands if operand.role is Role.OUTPUT for value in operand.values)
            own = graph.sub(match.nodes, match.id, outputs)
            trial = call_trial(match, own, kind, self.target, self.cases)
            right, wrong = (run_call(trial, call, kind, backend) for call in (
                framework_call(match, own), framework_call(match, own, off_by_a_tenth)))
            for case in trial.cases:
                why = misjudged(right, case)
                demand(not why, f"{match.id} [{case.family} {case.position}]: the reference refuses the framework's own result: {why}")
            if outputs:
                demand(bool(misjudged(wrong, trial.cases[0])), f"{match.id}: the reference passes a result that is off by a tenth")

    # ----

    def _find_into(self, found: list[Match], graph: Graph) -> None:
        found.extend(self.rule.find(graph, self.target))

    def _kind(self, match: Match) -> MatchKind:
        kind = next((kind for kind in self.rule.kinds if kind.name == match.kind), None)
        if kind is None:
            raise AssertionError(f"{match.id}: rule {self.rule.name} offers no kind {match.kind!r}")
        return kind

    def _matches(self) -> Iterator[tuple[Match, Graph]]:
        for graph in self.graphs:
            deps = dependencies(graph)
            for match in self.rule.find(graph, self.target):
                yield normalized(match, deps, self.rule.name), graph


def _truthful(match: Match, operand: Operand, graph: Graph) -> None:
    where = f"{match.id}: operand {operand.name}"
    specs = [graph.spec(value) for value in operand.values]
    demand(bool(specs), f"{where} stands for no value")
    numel = sum(spec.numel for spec in specs)
    demand(operand.spec.numel == numel, f"{where} has {operand.spec.numel} elements; its values have {numel}")
    other = next((spec.dtype.value for spec in specs if spec.dtype is not operand.spec.dtype), "")
    demand(not other, f"{where} is {operand.spec.dtype.value}; its values are {other}")
    writes = operand.access is not Access.READ
    if operand.role in (Role.OUTPUT, Role.STATE):
        demand(writes or operand.role is Role.STATE, f"{where} is an output that is only read")
    else:
        demand(not writes, f"{where} has role {operand.role.value} and is written; only outputs and states may be")


def _odd(graph: Graph) -> Iterator[Graph]:
    """Graphs that look like ``graph`` and hold nothing that a rule knows."""
    yield evolve(graph, name=f"{graph.name} without operators", nodes=(), outputs=graph.inputs[:1])
    yield evolve(graph, name=f"{graph.name} of unknown operators", nodes=tuple(_unknown(node) for node in graph.nodes))


def _unknown(node: Node) -> Node:
    return evolve(node, op=f"acme.{UNKNOWN}.default", kind=UNKNOWN)
