"""Where values lie: which are another's memory under another shape, and which may share memory in any way."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ..ir.graph import Graph, Node, Ref, ValueKind
from .per_graph import once_per_graph
from .schema import argument, shared_arguments

ALIGNMENT_BYTES = 256


def same_order(shape: Sequence[int], permutation: Sequence[int]) -> bool:
    """Whether permuting the axes of a contiguous tensor leaves its elements in the same order in memory."""
    moved = [axis for axis in permutation if shape[axis] != 1]
    return moved == sorted(moved)


def is_alias(graph: Graph, node: Node) -> bool:
    """Whether the one output of a node is its first input's memory under another contiguous shape.

    True for reshapes and for transposes that only move axes of extent 1; a slice or a real transpose is not an alias.
    """
    if node.kind != "view" or len(node.outputs) != 1 or len(node.inputs) != 1:
        return False
    source, result = graph.spec(node.inputs[0]), graph.spec(node.outputs[0])
    if source.numel != result.numel or source.dtype is not result.dtype:
        return False
    name = node.op.split(".")[1]
    if name == "contiguous" and result.strides:
        return False  # another memory format
    if name in ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "alias", "detach", "contiguous"):
        return True
    rank = len(source.shape)
    if name in ("transpose", "permute", "t", "swapaxes"):
        axes = _permutation(name, node, rank)
        return axes is not None and same_order(source.shape, axes)
    return name in ("expand",) and source.shape == result.shape


def _permutation(name: str, node: Node, rank: int) -> list[int] | None:
    axes = list(range(rank))
    if name == "permute":
        wanted = argument(node, "dims")
        return [int(a) % rank for a in wanted] if isinstance(wanted, tuple) else None  # type: ignore[arg-type]
    names = {"t": (), "transpose": ("dim0", "dim1"), "swapaxes": ("axis0", "axis1")}[name]
    moved = [argument(node, each) for each in names]
    first, second = (int(axis) % rank for axis in moved) if moved else (0, 1)  # type: ignore[arg-type]
    if rank > max(first, second):
        axes[first], axes[second] = axes[second], axes[first]
    return axes


@once_per_graph
def alias_roots(graph: Graph) -> Mapping[str, str]:
    """For every value the value whose memory it is (itself where it has its own); read-only."""
    roots = {value.name: value.name for value in graph.values}
    for node in graph.nodes:
        if is_alias(graph, node):
            roots[node.outputs[0]] = roots[node.inputs[0]]
    return MappingProxyType(roots)


@once_per_graph
def memory_roots(graph: Graph) -> Mapping[str, str]:
    """For every value one value that stands for all that it may share memory with: slices, transposes, results of writes in place.
    Read-only.

    Unlike ``alias_roots`` it says nothing about where in that memory a value lies.
    """
    roots = {value.name: value.name for value in graph.values}

    def root_of(name: str) -> str:
        while roots[name] != name:
            roots[name] = name = roots[roots[name]]
        return name

    for node in graph.nodes:
        sources = dict.fromkeys(name for argument_ in shared_arguments(node) for name in _values(argument_))
        for name in (*sources, *node.outputs) if sources else ():
            first = root_of(next(iter(sources)))
            roots[root_of(name)] = first
    return MappingProxyType({name: root_of(name) for name in roots})


def _values(given: object) -> list[str]:
    if isinstance(given, Ref):
        return [given.value]
    return [name for item in given for name in _values(item)] if isinstance(given, tuple) else []


def only_part(graph: Graph, node: Node) -> str:
    """The one operand of a concatenation that is not empty, where there is just one; it may lie otherwise than the result."""
    if node.op != "aten.cat.default" or not isinstance(node.args[0], tuple):
        return ""
    parts = [part.value for part in node.args[0] if isinstance(part, Ref) and graph.spec(part.value).numel]
    same = len(parts) == 1 and graph.spec(parts[0]).shape == graph.spec(node.outputs[0]).shape
    return parts[0] if same else ""


def written_in_place(graph: Graph) -> frozenset[str]:
    """Every value that may share memory with one that an operator writes in place; states, whose writers declare them, apart."""
    written = {name for node in graph.nodes for name in node.mutates if graph.kind_of(name) is not ValueKind.STATE}
    if not written:
        return frozenset()
    roots = memory_roots(graph)
    found = {roots[name] for name in written}
    return frozenset(name for name, root in roots.items() if root in found)


def seen_changing(graph: Graph) -> frozenset[str]:
    """Values of ``written_in_place`` whose memory something else shows: a view of it, or its old name read after the write.

    The others are a chain of names, each overwritten and not read again: any order that keeps data flow is right.
    """
    written = written_in_place(graph)
    if not written:
        return frozenset()
    roots = memory_roots(graph)
    chain = {name for node in graph.nodes if node.mutates for name in (*node.mutates, *node.outputs)}
    shown = {roots[name] for name in written - chain}
    overwritten: set[str] = set()
    for node in graph.nodes:
        shown.update(roots[name] for name in node.inputs if name in overwritten)
        overwritten.update(node.mutates)
    shown.update(roots[name] for name in graph.outputs if name in overwritten)
    return frozenset(name for name in written if roots[name] in shown)
