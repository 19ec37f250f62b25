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
from .laid_out import made_by
from .rewrite import rebuild


def without_writes(graph: Graph) -> Graph:
    """Replace calls like ``relu_`` by ``relu`` where what they overwrite is read by nothing afterwards.

    Before: ``b = relu_(a)``, a read by nobody else later. After: ``b = relu(a)``. Writes to inputs, weights and states stay, and
    so do those to memory that an earlier view still shows to somebody.
    """
    while True:
        memory = _Memory(graph)
        # All at once: a write that is gone leaves less memory to be seen by others, so that none of them can begin to matter.
        nodes = [_pure(graph, memory, index, node) or node for index, node in enumerate(graph.nodes)]
        if all(new is old for new, old in zip(nodes, graph.nodes, strict=True)):
            return graph
        graph = rebuild(graph, nodes)


class _Memory:
    """Who shares memory in a graph, where each name of it comes from, and who reads it last."""

    def __init__(self, graph: Graph) -> None:
        self._roots, count = memory_roots(graph), len(graph.nodes)
        self._names: dict[str, list[str]] = {}
        for name, root in self._roots.items():
            self._names.setdefault(root, []).append(name)
        self._outside = {root for root, names in self._names.items()
                         if any(graph.kind_of(name) is not ValueKind.INTERMEDIATE for name in names)}
        self._made = {out: index for index, node in enumerate(graph.nodes) for out in node.outputs}
        self._read = {name: index for index, node in enumerate(graph.nodes) for name in (*node.inputs, *node.mutates)}
        self._read |= dict.fromkeys(graph.outputs, count)

    def is_seen(self, index: int, name: str) -> bool:
        """Whether something outside, or something that runs behind node ``index``, looks at the memory of ``name`` by an earlier name."""
        root = self._roots[name]
        return root in self._outside or any(self._made.get(one, -1) < index < self._read.get(one, -1) for one in self._names[root])


def _pure(graph: Graph, memory: _Memory, index: int, node: Node) -> Node | None:
    """The pure twin of a call that writes its first operand and nothing else, where that changes nothing; else None."""
    if len(node.mutates) != 1 or len(node.outputs) != 1 or not node.args or node.args[0] != Ref(node.mutates[0]):
        return None
    found = None if memory.is_seen(index, node.mutates[0]) else pure_twin(graph, node)
    return found[0] if found is not None and found[1] == graph.spec(node.outputs[0]) else None


def pure_twin(graph: Graph, node: Node) -> tuple[Node, TensorSpec] | None:
    """The operator that makes anew what ``node`` writes over its first operand, and how that is laid out; None where there is none."""
    name, overload = node.op.split(".")[1:3]
    target, result = graph.spec(node.mutates[0]), graph.spec(node.outputs[0])
    others = [graph.spec(value) for value in node.inputs if value != node.mutates[0]]
    if not name.endswith("_") or not target.dtype.is_float or target != result or not all(_keeps(o, target) for o in others):
        return None
    op = f"aten.{name[:-1]}.{overload}"
    try:
        operator_of(op)
    except UsageError:  # copy_, zero_ and the like have no twin that takes the same arguments
        return None
    pure = canonical(evolve(node, op=op, kind=kind_of(op, target), mutates=()))
    if not any(spec.strides for spec in (target, *others)):
        return pure, target
    made = made_by(pure, {name: graph.spec(name) for name in pure.inputs})
    return (pure, made[0]) if made is not None and (made[0].shape, made[0].dtype) == (target.shape, target.dtype) else None


def _keeps(other: TensorSpec, target: TensorSpec) -> bool:
    """Whether a floating point ``target`` stays of its type beside an operand like ``other``: of the same, an index or a mask."""
    return other.dtype is target.dtype or not other.dtype.is_float


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
