"""What a candidate computes and how it is judged, without the names of nodes and values: equal for equal layers of several regions."""

from attrs import evolve

from ...ir import serial
from ...ir.candidate import Candidate
from ...ir.graph import Graph
from ...ir.region import Match
from ...ir.verdict import Trial
from ...ops.canonical import canonical


def computation_of(match: Match, graph: Graph) -> str:
    """Digest of what a match computes, ``graph`` its nodes: equal for matches that differ in the names of nodes and values only."""
    form = canonical(graph)
    nodes = {name: f"n{index}" for index, name in enumerate(form.nodes)}
    values = {name: f"v{index}" for index, name in enumerate(form.values)}
    operands = tuple(evolve(o, values=tuple(values.get(v, v) for v in o.values)) for o in match.operands)
    return serial.digest(form.signature, evolve(match, nodes=tuple(nodes.get(n, n) for n in match.nodes), operands=operands), length=32)


def twin_of(candidate: Candidate, trial: Trial, computation: str) -> str:
    """What candidates of one computation share that are judged alike: who serves it, source and launches, and the cases but for their
    seeds."""
    cases = [evolve(case, seed=0, weights_seed=0) for case in trial.cases]
    return serial.digest(computation, evolve(candidate.step, match_id=""), candidate.source.identity, trial.target, cases, length=32)
