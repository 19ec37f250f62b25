"""A rule tried on a graph exactly as a compilation tries it: for tests of rules, and to get matches to try families on."""

from ..errors import UsageError
from ..ir.graph import Graph
from ..ir.region import Match, Role
from ..ops.dependency import dependencies
from ..plugin.interfaces import RegionRule
from ..stages.analyze.checking import completed, kind_problem, normalized, problem
from .targets import FAKE


def matched(rule: RegionRule, graph: Graph) -> tuple[Match, Graph]:
    """The match of ``rule`` that covers most nodes of ``graph`` and that the core accepts, and its own graph.

    Raises:
        UsageError: there is none; the message holds why the core refused what the rule found.
    """
    deps, kinds = dependencies(graph), {kind.name: kind for kind in rule.kinds}
    usable, reasons = [], {}
    for found in rule.find(graph, FAKE):
        match = normalized(found, deps, f"tried/{rule.name}")
        kind = kinds.get(match.kind)
        unkind = kind_problem(match, kind) if kind is not None else f"rule {rule.name} offers no kind {match.kind}"
        reason = unkind or problem(match, graph, deps)
        if reason or kind is None:
            reasons[match.id] = reason
        else:
            usable.append(completed(match, kind, graph))
    if not usable:
        raise UsageError(f"rule {rule.name} finds nothing to serve in this graph {reasons or ''}; change its shapes or types")
    match = max(usable, key=lambda m: len(m.nodes))
    outputs = tuple(value for operand in match.operands if operand.role is Role.OUTPUT for value in operand.values)
    return match, graph.sub(match.nodes, match.id, outputs)
