"""Other bodies for operators of a graph: what a device computes in one launch, where the framework takes several."""

from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve

from ..ir.graph import Graph, Node, Ref

# ``bodies(op)`` or ``bodies(op, op)``: a callable, which returns None for arguments that it does not serve, or None.
Bodies = Callable[..., "Callable[..., Any] | None"]


def with_bodies(
    graph: Graph, nodes: Sequence[Node], outputs: Sequence[str], bodies: Bodies, operator_of: Callable[[str], Callable[..., Any]]
) -> tuple[list[Node], dict[str, Callable[..., Any]]]:
    """``nodes`` without those that became a part of another one, and callables by name of the nodes that have one.

    Two neighbours become one node, the second, where nothing else reads the first and the second's other operand is a tensor.
    """
    found: dict[str, Callable[..., Any]] = {}
    by_output = {node.outputs[0]: node for node in nodes if len(node.outputs) == 1}
    merged: dict[str, Node] = {}
    gone: set[str] = set()
    for node in nodes:
        alone = bodies(node.op)
        if alone is not None:
            found[node.name] = _either(alone, operator_of(node.op))
            continue
        for first, other in _pairs(node, by_output):
            both = bodies(first.op, node.op)
            if both is not None and first.outputs[0] not in outputs and _only_reader(graph, first, node):
                found[node.name] = _either_pair(both, operator_of(first.op), operator_of(node.op))
                merged[node.name] = evolve(node, args=(first.args[0], other))
                gone.add(first.name)
                break
    return [merged.get(node.name, node) for node in nodes if node.name not in gone], found


def _pairs(node: Node, by_output: dict[str, Node]) -> list[tuple[Node, Ref]]:
    """For each of two operands what made it, where that takes one tensor only, and the other operand."""
    if len(node.args) != 2 or node.kwargs or not all(isinstance(a, Ref) for a in node.args) or node.args[0] == node.args[1]:
        return []
    left, right = node.args
    pairs = [(by_output.get(a.value), b) for a, b in ((left, right), (right, left)) if isinstance(a, Ref) and isinstance(b, Ref)]
    return [(first, b) for first, b in pairs if first is not None and len(first.args) == 1 and not first.kwargs and not first.mutates
            and isinstance(first.args[0], Ref)]


def _only_reader(graph: Graph, first: Node, second: Node) -> bool:
    readers = [user.name for user in graph.users.get(first.outputs[0], ())]
    return readers == [second.name] and first.outputs[0] not in graph.outputs and not _written(graph, first, second)


def _written(graph: Graph, first: Node, second: Node) -> bool:
    """Whether anything between the two writes in place: then the first one's argument may be another by then."""
    names = [node.name for node in graph.nodes]
    return any(node.mutates for node in graph.nodes[names.index(first.name):names.index(second.name)])


def _either(body: Callable[..., Any], operator: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        found = body(*args, **kwargs)
        return operator(*args, **kwargs) if found is None else found

    return run


def _either_pair(body: Callable[..., Any], before: Callable[..., Any], after: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, other: Any) -> Any:
        found = body(x, other)
        return after(before(x), other) if found is None else found

    return run
