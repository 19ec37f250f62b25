"""Programs: an immutable executable schedule over planned buffers, made from a graph and its selections, and its bound form."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ..ir.candidate import StepSource
from ..errors import VerificationError
from ..ir.graph import Graph, Node, ValueKind
from ..ops.aliasing import Block, alias_roots, is_alias, place, side_by_side
from ..ir.plan import Origin, Step
from ..ir.region import Match, Region, Role, SemanticLabel
from ..ir.selection import Selection

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class Segment:
    """A run of framework nodes, or one step. ``operands`` maps operand names to graph values (several: side by side)."""

    nodes: tuple[str, ...]
    step: Step | None = None
    label: SemanticLabel = SemanticLabel.MIXED
    match: Match | None = None
    source: str = ""  # key of the StepSource; empty for framework nodes and bound callables
    operands: tuple[tuple[str, tuple[str, ...]], ...] = ()
    version: int = 0  # of the implementation that the step was validated with

    @property
    def origin(self) -> Origin:
        """Who wrote what runs here."""
        return self.step.origin if self.step else Origin.FRAMEWORK

    @property
    def is_call(self) -> bool:
        """Whether an implementation binds what runs here."""
        return self.step is not None and not self.source

    @property
    def name(self) -> str:
        """For people: the implementation, or the framework's nodes."""
        return self.step.implementation if self.step else ", ".join(self.nodes[:3]) + (", ..." if len(self.nodes) > 3 else "")

    def values(self, roles: tuple[Role, ...]) -> tuple[str, ...]:
        """Graph values of the operands with one of ``roles``."""
        if self.match is None:
            return ()
        wanted = {operand.name for operand in self.match.operands if operand.role in roles}
        return tuple(value for name, values in self.operands if name in wanted for value in values)


@frozen(kw_only=True)
class Program:
    """Segments in execution order over one graph, and the sources they launch."""

    graph: Graph
    segments: tuple[Segment, ...]
    sources: tuple[StepSource, ...] = ()

    def verify(self) -> "Program":
        """Check that every node runs exactly once (views may be folded into addresses); return self."""
        seen: set[str] = set()
        for segment in self.segments:
            for node in segment.nodes:
                if node in seen:
                    raise VerificationError(f"program {self.graph.name}: node {node} runs twice")
                seen.add(node)
        missing = [n.name for n in self.graph.nodes if n.name not in seen and not is_alias(self.graph, n)]
        if missing:
            raise VerificationError(f"program {self.graph.name}: nodes never run: {', '.join(missing[:5])}")
        return self


@frozen(kw_only=True)
class Piece:
    """One bound segment, or several neighbours of one kind: ``run`` enqueues it on the current stream.

    ``capturable``: whether a CUDA graph may hold it; what may not runs from Python, between the graphs on its two sides.
    """

    run: Callable[[], None]
    capturable: bool = True
    names: tuple[str, ...] = ()


class BoundProgram:
    """A program with addresses. ``run`` enqueues all of it on the current stream."""

    def __init__(self, program: Program, parts: Sequence[Piece], environment: "dict[str, torch.Tensor]", keep: list[Any]) -> None:
        self.program = program
        self.environment = environment
        self._parts = tuple(parts)
        self._keep = keep

    def run(self) -> None:
        """Run every segment once."""
        for part in self._parts:
            part.run()

    @property
    def uncapturable(self) -> tuple[str, ...]:
        """Names of the segments that no CUDA graph may hold."""
        return tuple(name for part in self._parts if not part.capturable for name in part.names)

    def pieces(self) -> tuple[Piece, ...]:
        """The program in as few pieces as can be, in order: each one wholly capturable, or wholly not."""
        groups: list[list[Piece]] = []
        for part in self._parts:
            if not groups or groups[-1][0].capturable is not part.capturable:
                groups.append([])
            groups[-1].append(part)
        return tuple(_joined(group) for group in groups)

    def output(self, index: int) -> "torch.Tensor":
        """Tensor of one graph output, valid after ``run``."""
        return self.environment[self.program.graph.outputs[index]]


def _joined(parts: list[Piece]) -> Piece:
    runs = tuple(part.run for part in parts)

    def run() -> None:
        for one in runs:
            one()

    return Piece(run=run, capturable=parts[0].capturable, names=tuple(name for part in parts for name in part.names))


def framework_program(graph: Graph) -> Program:
    """The program that interprets every node."""
    return Program(graph=graph, segments=(Segment(nodes=tuple(n.name for n in graph.nodes)),))


def make_program(graph: Graph, regions: tuple[Region, ...], selections: Mapping[str, Selection]) -> Program:
    """Put the selected steps of every region instance in place of their nodes, in a valid order.

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
    return Program(graph=graph, segments=_ordered(graph, steps), sources=tuple(sources[k] for k in sorted(sources))).verify()


def without_steps(program: Program, lost: Callable[[Segment], bool]) -> Program:
    """The same program with the nodes of every step that is ``lost`` on the framework."""
    steps = [s for s in program.segments if s.step is not None and not lost(s)]
    used = {s.source for s in steps}
    sources = tuple(s for s in program.sources if s.key in used)
    return evolve(program, segments=_ordered(program.graph, steps), sources=sources).verify()


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
    before = _dependencies(graph, group_of, len(groups))
    index = {node.name: i for i, node in enumerate(graph.nodes)}
    order = _topological(before, [min(index[n] for n in group.nodes) for group in groups])
    return _coalesced([groups[i] for i in order])


def _dependencies(graph: Graph, group_of: Mapping[str, int], count: int) -> list[set[int]]:
    """Groups that must run before each group: data, and the order of accesses to whatever is mutated."""
    before: list[set[int]] = [set() for _ in range(count)]
    mutated = {name for node in graph.nodes for name in node.mutates}
    roots = alias_roots(graph)
    touched = mutated | {roots[name] for name in mutated}
    last_write: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for node in graph.nodes:
        group = group_of[node.name]
        for name in node.inputs:
            producer = graph.producer.get(name)
            if producer is not None:
                before[group].add(group_of[producer.name])
            root = roots[name]
            if root in touched:
                if root in last_write:
                    before[group].add(last_write[root])
                readers.setdefault(root, []).append(group)
        for name in node.mutates:
            root = roots[name]
            before[group].update(readers.pop(root, ()))
            if root in last_write:
                before[group].add(last_write[root])
            last_write[root] = group
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


def without_views(graph: Graph, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Drop framework segments that hold nothing but aliases of what no framework node makes: those are addresses, known at bind."""
    roots = alias_roots(graph)
    made = {o for s in segments if s.step is None for n in s.nodes for o in graph.node_by_name[n].outputs}

    def foldable(name: str) -> bool:
        node = graph.node_by_name[name]
        return is_alias(graph, node) and roots[node.outputs[0]] not in made

    return tuple(s for s in segments if s.step is not None or not all(foldable(n) for n in s.nodes))


def buffer_plan(program: Program, segments: tuple[Segment, ...], fixed: tuple[str, ...] = ()) -> tuple[dict[str, int], int]:
    """Arena offsets of every value that a step writes or reads and that no one else owns, and the arena's size in bytes.

    ``fixed`` are further values that need a place of their own.

    Lifetimes are in segments; an alias keeps its root alive. Values that a framework segment produces for a step get a
    place too: they are copied there.
    """
    graph = program.graph
    roots = alias_roots(graph)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    groups: dict[str, tuple[str, ...]] = {}
    for index, segment in enumerate(segments):
        reads, writes = _touched(graph, segment)
        for name in (*reads, *writes):
            root = roots[name]
            if graph.kind_of(root) is ValueKind.INTERMEDIATE:
                first.setdefault(root, index)
                last[root] = index
        for name, values in segment.operands:
            operand = next(o for o in segment.match.operands if o.name == name) if segment.match else None
            if operand is not None and operand.role is Role.OUTPUT and len(values) > 1:
                own = tuple(roots[v] for v in values)
                for value in own:
                    groups[value] = own
    for name in graph.outputs:
        if roots[name] in last:
            last[roots[name]] = len(segments)
    needed = tuple(dict.fromkeys((*_step_values(graph, segments, roots), *fixed)))
    blocks: list[Block] = []
    done: set[str] = set()
    for value in needed:
        if value in done:
            continue
        group = groups.get(value, (value,))
        done.update(group)
        nbytes = {v: graph.spec(v).nbytes for v in group}
        blocks.append(Block(values=side_by_side(group, nbytes), nbytes=sum(nbytes.values()),
                            first=min(first[v] for v in group), last=max(last[v] for v in group)))
    return place(blocks)


def _touched(graph: Graph, segment: Segment) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if segment.step is not None:
        return (segment.values((Role.INPUT, Role.LENGTH, Role.WEIGHT, Role.CONSTANT, Role.STATE)), segment.values((Role.OUTPUT,)))
    nodes: list[Node] = [graph.node_by_name[n] for n in segment.nodes]
    return (tuple(i for n in nodes for i in n.inputs), tuple(o for n in nodes for o in n.outputs))


def _step_values(graph: Graph, segments: tuple[Segment, ...], roots: Mapping[str, str]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for segment in segments:
        for _, values in segment.operands:
            for value in values:
                root = roots[value]
                if graph.kind_of(root) is ValueKind.INTERMEDIATE:
                    found[root] = None
    return tuple(found)

