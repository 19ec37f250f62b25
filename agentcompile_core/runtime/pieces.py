"""Where a program is cut because a captured graph cannot hold a part of it, and what must then keep its address."""

from collections.abc import Callable, Sequence

from ..ir.graph import Graph, Node, ValueKind
from ..ops.aliasing import alias_roots
from ..ops.names import DATA_DEPENDENT, operator
from .program import Segment


def is_capturable(node: Node) -> bool:
    """Whether a framework node can be part of a captured graph: its shapes do not depend on data, and it brings nothing to the host."""
    return operator(node)[0] not in DATA_DEPENDENT


def cut(graph: Graph, segments: Sequence[Segment], apart: Sequence[str] = ()) -> tuple[Segment, ...]:
    """The same segments, where framework nodes that cannot be captured, and those called ``apart``, are segments of their own."""
    alone = frozenset(apart)
    found: list[Segment] = []
    for segment in segments:
        if segment.step is not None:
            found.append(segment)
            continue
        run: list[str] = []
        for name in segment.nodes:
            if name not in alone and is_capturable(graph.node_by_name[name]):
                run.append(name)
                continue
            found += [Segment(nodes=tuple(run))] if run else []
            found.append(Segment(nodes=(name,)))
            run = []
        found += [Segment(nodes=tuple(run))] if run else []
    return tuple(found)


def runs_outside(graph: Graph, segment: Segment) -> bool:
    """Whether a framework segment stays outside of captured graphs."""
    return segment.step is None and not all(is_capturable(graph.node_by_name[name]) for name in segment.nodes)


def fixed_values(graph: Graph, segments: Sequence[Segment], outside: Callable[[Segment], bool]) -> tuple[str, ...]:
    """Values that framework segments ``outside`` of captured graphs make for others: a captured reader knows one address only."""
    roots = alias_roots(graph)
    found = []
    for segment in segments:
        if outside(segment):
            made = [o for name in segment.nodes for o in graph.node_by_name[name].outputs]
            found += [o for o in made if roots[o] == o and graph.kind_of(o) is ValueKind.INTERMEDIATE]
    return tuple(found)
