"""What the steps of somebody else's programs claim to compute, as trials: equal computations are one claim, however often they occur."""

from collections.abc import Callable, Container, Mapping

from attrs import evolve, field, frozen

from ..ir import serial
from ..ir.candidate import StepSource
from ..ir.graph import Graph, map_refs
from ..ir.plan import Step
from ..ir.region import Role
from ..ir.target import Target
from ..ir.verdict import Trial
from ..ops.canonical import canonical
from ..runtime.program import Program, Segment

Place = tuple[str, tuple[str, ...]]  # a segment: name of its graph, and its nodes


@frozen(kw_only=True)
class Claim:
    """A step and what it is to be tried on, without cases; ``places`` are the segments that it runs in."""

    step: Step
    trial: Trial = field(repr=False)
    places: tuple[Place, ...]


def claims_of(programs: Mapping[str, Program], wanted: Container[str], target: Target,
              call_of: Callable[[Segment], StepSource | None] = lambda segment: None) -> tuple[Claim, ...]:
    """The claims of all segments whose source is one of ``wanted`` (by key), those of one computation together.

    ``call_of`` says what stands for the source of a step that an implementation binds; None: no claim.

    Two segments are one claim where step, match, source, operators and the places of their operands are the same; what a match
    says of its nodes is not believed, so that its kernel is judged by the nodes that it would replace.
    """
    found: dict[str, Claim] = {}
    for program in programs.values():
        sources = {source.key: source for source in program.sources}
        for segment in program.segments:
            source = call_of(segment) if segment.is_call else sources[segment.source] if segment.source in wanted else None
            if source is not None and segment.step is not None and segment.match is not None:
                trial, form = _trial(program.graph, segment, source, target)
                known = found.get(form)
                places = (*(known.places if known else ()), (program.graph.name, segment.nodes))
                found[form] = Claim(step=segment.step, trial=known.trial if known else trial, places=places)
    return tuple(found.values())


def _trial(graph: Graph, segment: Segment, source: StepSource, target: Target) -> tuple[Trial, str]:
    """The trial of one segment in the names of its match, and a digest of everything in it but names."""
    match, given = segment.match, dict(segment.operands)
    assert match is not None
    outputs = tuple(value for o in match.operands if o.role is Role.OUTPUT for value in given[o.name])
    sub = graph.sub(segment.nodes, match.id, outputs)
    names = {mine: its for o in match.operands for mine, its in zip(given[o.name], o.values)}
    local = _renamed(sub, dict(zip(segment.nodes, match.nodes)), names)
    form = canonical(local)
    index = {name: i for i, name in enumerate(form.values)}
    operands = [[o.name, [index.get(value, -1) for value in o.values]] for o in match.operands]
    digest = serial.digest(segment.step, match, source.key, form.signature, operands)
    return Trial(match=match, graph=local, source=source, target=target, cases=()), digest


def _renamed(graph: Graph, nodes: Mapping[str, str], names: Mapping[str, str]) -> Graph:
    """The graph with its boundary under the match's names; values in between get new ones where those would collide."""
    if all(old == new for old, new in (*nodes.items(), *names.items())):
        return graph
    full = {value.name: names.get(value.name, f"inner.{i}") for i, value in enumerate(graph.values)}
    renamed = tuple(evolve(node, name=nodes.get(node.name, node.name), args=tuple(map_refs(a, full) for a in node.args),
                           kwargs=tuple((key, map_refs(a, full)) for key, a in node.kwargs),
                           outputs=tuple(full[v] for v in node.outputs), mutates=tuple(full[v] for v in node.mutates))
                    for node in graph.nodes)
    return evolve(graph, nodes=renamed, values=tuple(evolve(v, name=full[v.name]) for v in graph.values),
                  inputs=tuple(full[v] for v in graph.inputs), outputs=tuple(full.get(v, v) for v in graph.outputs))
