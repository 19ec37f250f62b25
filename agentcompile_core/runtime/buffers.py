"""Which values of a program need memory of its own, when, and where in one arena."""

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from ..ir.graph import Graph, Node, Ref, ValueKind
from ..ir.region import Role
from ..ops.aliasing import ALIGNMENT_BYTES, alias_roots, is_alias, memory_roots
from ..ops.schema import argument
from .placement import Block, place, side_by_side

if TYPE_CHECKING:
    pass
from .program import Program, Segment


def without_views(graph: Graph, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Drop framework segments that hold nothing but aliases of what no framework node makes: those are addresses, known at bind."""
    roots = alias_roots(graph)
    made = {o for s in segments if s.step is None for n in s.nodes for o in graph.node_by_name[n].outputs}

    def foldable(name: str) -> bool:
        node = graph.node_by_name[name]
        return is_alias(graph, node) and roots[node.outputs[0]] not in made

    return tuple(s for s in segments if s.step is not None or not all(foldable(n) for n in s.nodes))


def rows_of_operands(graph: Graph, segments: tuple[Segment, ...]) -> dict[str, tuple[str, int]]:
    """Operands of steps that are slices of another value and lie in one piece of it: that value, and from which element on."""
    found: dict[str, tuple[str, int]] = {}
    for value in dict.fromkeys(value for segment in segments for _, values in segment.operands for value in values):
        node = graph.producer.get(value)
        if node is None or node.op != "aten.slice.Tensor" or not isinstance(node.args[0], Ref):
            continue
        base, axis, first = node.args[0].value, argument(node, "dim"), argument(node, "start")
        if not isinstance(axis, int) or not isinstance(first, int) or min(axis, first) < 0 or argument(node, "step") != 1:
            continue
        shape, has_states = graph.spec(base).shape, graph.kind_of(base) is ValueKind.STATE
        at, one = first * prod(shape[axis + 1 :]), graph.spec(value)
        aligned = one.numel == 1 or at * one.dtype.bytes % ALIGNMENT_BYTES == 0  # kernels read operands in vectors
        if prod(shape[:axis]) == 1 and aligned and not graph.spec(base).strides and (has_states or base in graph.producer):
            found[value] = base, at
    return found


def buffer_plan(program: Program, segments: tuple[Segment, ...], fixed: tuple[str, ...] = (),
                elsewhere: tuple[str, ...] = ()) -> tuple[dict[str, int], int]:
    """Arena offsets of every value that a step writes or reads and that no one else owns, and the arena's size in bytes.

    ``fixed`` are further values that need a place of their own; those ``elsewhere`` get none.

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
    for name in graph.outputs:
        last[memory[name]] = len(segments)
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
