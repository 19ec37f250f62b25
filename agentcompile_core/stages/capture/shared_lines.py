"""Heads of a recurrence share lines of keys and queries that a model repeats for each of them."""

from attrs import evolve

from ...ir.graph import Argument, Graph, Node, Ref, Value, refs_of
from ...ops.operator_names import RECURRENCE
from ...ops.overloads import is_pointwise
from ...ops.region_view import is_contiguous
from ...ops.schema import argument as argument_of
from ...ops.schema import canonical, parameters
from .rewrite import View, rebuild

_REPEAT = "aten.repeat_interleave.self_int"
_REDUCED = frozenset({"aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default", "aten.amin.default", "aten.linalg_vector_norm.default"})
_SHARED = ("keys", "queries")  # of which neighbouring heads may read one line


def share_lines(graph: Graph) -> Graph:
    """Keys and queries that heads share are computed once, not once per head.

    Before: ``k = repeat_interleave(x, r, 2)`` of an x [1, T, G, N]; ``n = k * rsqrt(sum(k * k, -1, True))``; q likewise;
    ``recurrence(..., n, q, ...)``.
    After: ``n = x * rsqrt(sum(x * x, -1, True))``; an x whose elements lie apart is copied in order first, as the repetition did.
    """
    view = View(graph)
    chains = [_chain(view, node) for node in graph.nodes if node.op == RECURRENCE]
    lines = {name: count for chain in chains for name, count in chain.items()}
    return _shared(graph, lines) if lines else graph


def _chain(view: View, last: Node) -> dict[str, int]:
    """All nodes from repeated lines to the keys and queries of ``last``, each with the number of lines; none: heads cannot share them."""
    heads, left = view.shape(argument_of(last, "keys"))[:3], [name for one in _SHARED for name in refs_of(argument_of(last, one))]
    found, lines = dict[str, Node](), set[int]()
    while left:
        node = view.node(Ref(left.pop()))
        # What reduces and leaves a row for each head went along the last axis, or along one of a single element.
        if node is None or node.mutates or not _lies_in_rows(view, node, heads):
            return {}
        if node.op == _REPEAT:
            lines.add(view.shape(node.args[0])[2])
        elif is_pointwise(node.op) or node.op in _REDUCED:
            left += node.inputs if node.name not in found else ()
        else:
            return {}
        found[node.name] = node
    others = [argument_of(last, one.name) for one in parameters(last.op) if one.name not in _SHARED]
    # As many lines as heads were repeated along another axis.
    if len(lines) != 1 or heads[2] in lines or not view.private(tuple(found.values()), last) or _is_read(found, others):
        return {}
    return dict.fromkeys(found, lines.pop())


def _lies_in_rows(view: View, node: Node, heads: tuple[int, ...]) -> bool:
    """Whether the result of ``node`` is a row for each of ``heads`` [1, T, H], one behind the other."""
    spec = view.graph.spec(node.outputs[0])
    return len(spec.shape) == 4 and spec.shape[:3] == heads and is_contiguous(spec)


def _is_read(nodes: dict[str, Node], arguments: list[Argument]) -> bool:
    """Whether a result of ``nodes`` is among ``arguments``."""
    made = {out for node in nodes.values() for out in node.outputs}
    return any(name in made for one in arguments for name in refs_of(one))


def _shared(graph: Graph, lines: dict[str, int]) -> Graph:
    """``graph`` with so many lines in the results of these nodes, whose repetitions are gone."""
    nodes, renamed = list[Node](), dict[str, str]()
    for node in graph.nodes:
        source = node.inputs[0] if node.name in lines and node.op == _REPEAT else ""
        if not source:
            nodes.append(node)
        elif is_contiguous(graph.spec(source)):
            renamed[node.outputs[0]] = source
        else:  # sums of rows that lie apart may add in another order
            nodes.append(canonical(evolve(node, op="aten.contiguous.default", kind="copy", args=(Ref(source),), kwargs=())))
    made = {out: lines[node.name] for node in graph.nodes if node.name in lines for out in node.outputs}
    values = [_of_lines(value, made[value.name]) if value.name in made else value for value in graph.values]
    return rebuild(evolve(graph, values=tuple(values)), nodes, renamed)


def _of_lines(value: Value, count: int) -> Value:
    shape = value.spec.shape
    return evolve(value, spec=evolve(value.spec, shape=(*shape[:2], count, shape[3]), strides=()))
