"""Selections in place of their nodes, in every instance of their region, in a valid order."""

from collections.abc import Callable, Iterable, Mapping

from attrs import evolve

from ..errors import VerificationError
from ..ir.candidate import StepSource
from ..ir.graph import Graph
from ..ir.region import Region
from ..ir.selection import Selection
from ..ops.dependency import bits, dependencies
from .program import Program, Segment


def make_program(graph: Graph, regions: tuple[Region, ...], selections: Mapping[str, Selection], start: int = 0) -> Program:
    """Put the selected steps of every region instance in place of their nodes, in a valid order, to serve positions from ``start`` on.

    Raises:
        VerificationError: the steps of a selection depend on each other in a circle.
    """
    steps: list[Segment] = []
    sources: dict[str, StepSource] = {}
    for region in regions:
        selection = selections.get(region.signature)
        if selection is None:
            continue
        for selected in selection.steps:
            match = region.match_by_id[selected.step.match_id]
            if selected.source is not None:
                sources[selected.source.key] = selected.source
            for instance in region.instances:
                operands = tuple((o.name, tuple(instance.value[v] for v in o.values)) for o in match.operands)
                steps.append(Segment(nodes=tuple(instance.node[n] for n in match.nodes), step=selected.step, label=selected.label,
                                     match=match, source=selected.source.key if selected.source else "", operands=operands,
                                     version=selected.version))
    ordered = tuple(sources[k] for k in sorted(sources))
    return Program(graph=graph, segments=_ordered(graph, steps), sources=ordered, start=start).verify()


def without_steps(program: Program, lost: Callable[[Segment], bool]) -> Program:
    """The same program with the nodes of every step that is ``lost`` on the framework."""
    steps = [s for s in program.segments if s.step is not None and not lost(s)]
    used = {s.source for s in steps}
    sources = tuple(s for s in program.sources if s.key in used)
    return evolve(program, segments=_ordered(program.graph, steps), sources=sources).verify()


def with_steps(program: Program, added: Iterable[Segment]) -> Program:
    """The same program with ``added``, steps that implementations bind, in place of nodes that the framework ran.

    Raises:
        VerificationError: a node of them is in another step, or steps depend on each other in a circle.
    """
    steps = [s for s in program.segments if s.step is not None]
    return evolve(program, segments=_ordered(program.graph, [*steps, *added])).verify()


def _ordered(graph: Graph, steps: list[Segment]) -> tuple[Segment, ...]:
    group_of: dict[str, int] = {}
    groups: list[Segment] = []
    for segment in steps:
        for node in segment.nodes:
            if node in group_of:
                raise VerificationError(f"node {node} is in two selected steps")
            group_of[node] = len(groups)
        groups.append(segment)
    for single in graph.nodes:
        if single.name not in group_of:
            group_of[single.name] = len(groups)
            groups.append(Segment(nodes=(single.name,)))
    before = _before(graph, group_of, len(groups))
    index = {node.name: i for i, node in enumerate(graph.nodes)}
    order = _topological(before, [min(index[n] for n in group.nodes) for group in groups])
    return _coalesced([groups[i] for i in order])


def _before(graph: Graph, group_of: Mapping[str, int], count: int) -> list[set[int]]:
    """Groups that must run before each group."""
    known = dependencies(graph)
    before: list[set[int]] = [set() for _ in range(count)]
    for name, mask in zip(known.names, known.before, strict=True):
        before[group_of[name]].update(group_of[known.names[i]] for i in bits(mask))
    for group, earlier in enumerate(before):
        earlier.discard(group)
    return before


def _topological(before: list[set[int]], priority: list[int]) -> list[int]:
    import heapq

    waiting = [len(b) for b in before]
    after: list[list[int]] = [[] for _ in before]
    for group, earlier in enumerate(before):
        for e in earlier:
            after[e].append(group)
    ready = [(priority[g], g) for g, n in enumerate(waiting) if n == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, group = heapq.heappop(ready)
        order.append(group)
        for later in after[group]:
            waiting[later] -= 1
            if waiting[later] == 0:
                heapq.heappush(ready, (priority[later], later))
    if len(order) != len(before):
        raise VerificationError("the selected steps depend on each other in a circle")
    return order


def _coalesced(segments: list[Segment]) -> tuple[Segment, ...]:
    """Join neighbouring framework segments."""
    joined: list[Segment] = []
    for segment in segments:
        if joined and segment.step is None and joined[-1].step is None:
            joined[-1] = Segment(nodes=joined[-1].nodes + segment.nodes)
        else:
            joined.append(segment)
    return tuple(joined)
