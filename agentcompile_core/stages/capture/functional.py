"""Writes in place that nobody can tell from new values become pure operators, which rules match and kernels fuse."""

from attrs import evolve

from ...errors import UsageError
from ...ir.graph import Graph, Node, Ref, TensorSpec, ValueKind
from ...ops.aliasing import memory_roots, written_in_place
from ...ops.allowed import unfit
from ...ops.overloads import operator_of
from ...ops.schema import argument, canonical, parameters
from .attention import Unsupported
from .kinds import kind_of
from .rewrite import rebuild


def without_writes(graph: Graph) -> Graph:
    """Replace calls like ``relu_`` by ``relu`` where what they overwrite is read by nothing afterwards.

    Before: ``b = relu_(a)``, a read by nobody else later. After: ``b = relu(a)``. Writes to inputs, weights and states stay, and
    so do those to memory that an earlier view still shows to somebody.
    """
    while True:
        found = next(((i, pure) for i, node in enumerate(graph.nodes) if (pure := _pure(graph, i, node)) is not None), None)
        if found is None:
            return graph
        nodes = list(graph.nodes)
        nodes[found[0]] = found[1]
        graph = rebuild(graph, nodes)


def _pure(graph: Graph, index: int, node: Node) -> Node | None:
    """The pure twin of a call that writes its first operand and nothing else, where that changes nothing; else None."""
    if len(node.mutates) != 1 or len(node.outputs) != 1 or not node.args or node.args[0] != Ref(node.mutates[0]):
        return None
    name, overload = node.op.split(".")[1:3]
    target, result = graph.spec(node.mutates[0]), graph.spec(node.outputs[0])
    others = [graph.spec(value) for value in node.inputs if value != node.mutates[0]]
    same_form = target == result and not target.strides and all(_keeps(o, target) and not o.strides for o in others)
    if not name.endswith("_") or not target.dtype.is_float or not same_form or _is_seen(graph, index, node):
        return None
    op = f"aten.{name[:-1]}.{overload}"
    try:
        operator_of(op)
    except UsageError:  # copy_, zero_ and the like have no twin that takes the same arguments
        return None
    return canonical(evolve(node, op=op, kind=kind_of(op, target), mutates=()))


def _keeps(other: TensorSpec, target: TensorSpec) -> bool:
    """Whether a floating point ``target`` stays of its type beside an operand like ``other``: of the same, an index or a mask."""
    return other.dtype is target.dtype or not other.dtype.is_float


def _is_seen(graph: Graph, index: int, node: Node) -> bool:
    """Whether something outside, or something that runs later, looks at the memory of ``node`` by an earlier name."""
    roots = memory_roots(graph)
    shown = {name for name, root in roots.items() if root == roots[node.mutates[0]]}
    if any(graph.kind_of(name) is not ValueKind.INTERMEDIATE for name in shown):
        return True
    later = {out for one in graph.nodes[index:] for out in one.outputs}
    earlier = shown - later
    reads = {name for one in graph.nodes[index + 1:] for name in (*one.inputs, *one.mutates)} | set(graph.outputs)
    return bool(earlier & reads)


_OWNED = {ValueKind.INPUT: "its arguments", ValueKind.WEIGHT: "its own parameters", ValueKind.CONSTANT: "its own buffers"}


def check_writes(graph: Graph) -> Graph:
    """Return ``graph``, which computes on copies of its inputs and leaves the model as it is.

    Raises:
        Unsupported: an operator writes to the memory of an input, a parameter or a buffer, or does what it does in training.
    """
    for node in graph.nodes:
        why = unfit(node.op, {p.name: argument(node, p.name) for p in parameters(node.op)})
        if why:
            raise Unsupported(f"its {node.op.split('.')[1]} {why}")
    written = written_in_place(graph)
    owner = next((_OWNED[value.kind] for value in graph.values if value.name in written and value.kind in _OWNED), "")
    if owner:
        raise Unsupported(f"it writes to {owner}")
    return graph
