"""Which values of a program need memory of its own, when, and where in one arena."""

from collections.abc import Mapping, Sequence

from ..ir.graph import Graph, Node, ValueKind
from ..ir.region import Role
from ..ops.aliasing import alias_roots, is_alias, memory_roots
from .placement import Block, place, side_by_side
from .program import Program, Segment


def without_views(graph: Graph, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Drop framework segments that hold nothing but aliases of what no framework node makes: those are addresses, known at bind."""
    roots = alias_roots(graph)
    made = {o for s in segments if s.step is None for n in s.nodes for o in graph.node_by_name[n].outputs}

    def foldable(name: str) -> bool:
        node = graph.node_by_name[name]
        return is_alias(graph, node) and roots[node.outputs[0]] not in made

    return tuple(s for s in segments if s.step is not None or not all(foldable(n) for n in s.nodes))


def buffer_plan(program: Program, segments: tuple[Segment, ...], fixed: tuple[str, ...] = (), elsewhere: tuple[str, ...] = (),
                beside: Sequence[Sequence[str]] = (), parts: Mapping[str, str] | None = None) -> tuple[dict[str, int], int]:
    """Arena offsets of every value that a step writes or reads and that no one else owns, and the arena's size in bytes.

    ``fixed`` are further values that need a place of their own; those ``elsewhere`` get none. Values ``beside`` each other lie behind
    each other, without gaps. ``parts``: values ``elsewhere`` that are written to a part of another one, which lives as long as any of them.

    Lifetimes are in segments; whatever may share its memory (an alias, a slice) keeps a value alive. Values that a framework
    segment produces for a step get a place too: they are copied there.
    """
    graph = program.graph
    roots, memory = alias_roots(graph), memory_roots(graph)
    first: dict[str, int] = {}
    last: dict[str, int] = {}  # by memory
    groups: dict[str, tuple[str, ...]] = {}
    for index, segment in enumerate(segments):
        reads, writes = _touched(graph, segment)
        for name in (*reads, *writes):
            root = roots[name]
            if graph.kind_of(root) is ValueKind.INTERMEDIATE:
                first.setdefault(root, index)
                last[memory[root]] = index
        for name, values in segment.operands:
            operand = next(o for o in segment.match.operands if o.name == name) if segment.match else None
            if operand is not None and operand.role is Role.OUTPUT and len(values) > 1:
                own = tuple(roots[v] for v in values)
                for value in own:
                    groups[value] = own
    for names in beside:
        groups |= dict.fromkeys(names, tuple(names))
    for name in graph.outputs:
        last[memory[name]] = len(segments)
    for part, whole in (parts or {}).items():
        first[whole] = min(first[whole], first[roots[part]])
        last[memory[whole]] = max(last[memory[whole]], last[memory[roots[part]]])
    needed = tuple(v for v in dict.fromkeys((*_step_values(graph, segments, roots), *fixed)) if v not in elsewhere)
    blocks: list[Block] = []
    done: set[str] = set()
    for value in needed:
        if value in done:
            continue
        group = groups.get(value, (value,))
        done.update(group)
        nbytes = {v: graph.spec(v).nbytes for v in group}
        blocks.append(Block(values=side_by_side(group, nbytes), nbytes=sum(nbytes.values()),
                            first=min(first[v] for v in group), last=max(last[memory[v]] for v in group)))
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
