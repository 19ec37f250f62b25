"""Where a program is cut because a captured graph cannot hold a part of it, and what must then keep its address."""

from collections.abc import Callable, Mapping, Sequence

from ..ir.graph import Graph, Node, ValueKind
from ..ops.aliasing import alias_roots
from ..ops.operator_names import ATTENTION, DATA_DEPENDENT, operator
from .program import Segment


def is_capturable(node: Node) -> bool:
    """Whether a framework node can be part of a captured graph: its shapes do not depend on data, and it brings nothing to the host."""
    return operator(node)[0] not in DATA_DEPENDENT


def cut(graph: Graph, segments: Sequence[Segment], apart: "Mapping[str, tuple[str, ...]] | None" = None) -> tuple[Segment, ...]:
    """The same segments, where framework nodes that cannot be captured, and those called ``apart``, are segments of their own.

    ``apart`` maps a node to those before it that become part of its segment.
    """
    alone = apart or {}
    moved = {name for names in alone.values() for name in names}
    found: list[Segment] = []
    for segment in segments:
        if segment.step is not None:
            found.append(segment)
            continue
        run: list[str] = []
        for name in segment.nodes:
            if name in moved:
                continue
            if name not in alone and is_capturable(graph.node_by_name[name]):
                run.append(name)
                continue
            found += [Segment(nodes=tuple(run))] if run else []
            found.append(Segment(nodes=(*alone.get(name, ()), name)))
            run = []
        found += [Segment(nodes=tuple(run))] if run else []
    return tuple(found)


def runs_outside(graph: Graph, segment: Segment) -> bool:
    """Whether a framework segment stays outside of captured graphs."""
    return segment.step is None and not all(is_capturable(graph.node_by_name[name]) for name in segment.nodes)


def outer(graph: Graph, segment: Segment) -> list[Node]:
    """Of a segment that runs outside of captured graphs the nodes that do: of a call of attention not those that make its operands."""
    nodes = [graph.node_by_name[name] for name in segment.nodes]
    return [node for node in nodes if node.op == ATTENTION] or nodes


def fixed_values(graph: Graph, segments: Sequence[Segment], outside: Callable[[Segment], bool]) -> tuple[str, ...]:
    """Values that framework segments ``outside`` of captured graphs make for others: a captured reader knows one address only."""
    roots = alias_roots(graph)
    found = []
    for segment in segments:
        if outside(segment):
            made = [o for node in outer(graph, segment) for o in node.outputs]
            found += [o for o in made if roots[o] == o and graph.kind_of(o) is ValueKind.INTERMEDIATE]
    return tuple(found)
