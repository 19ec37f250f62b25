"""Other bodies for operators of a graph: what a device computes in one launch, where the framework takes several."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from attrs import evolve

from ..ir.graph import Graph, Node, Ref, ValueKind
from .operator_names import ADD, LINEAR, MULTIPLY, NORMS, SUM
from .write_order import written_between

# ``bodies(op)`` or ``bodies(op, op)``: a callable, which returns None for arguments that it does not serve, or None.
Bodies = Callable[..., "Callable[..., Any] | None"]


def with_bodies(
    graph: Graph, nodes: Sequence[Node], outputs: Sequence[str], bodies: Bodies, operator_of: Callable[[str], Callable[..., Any]],
    known: Collection[str] = (),
) -> tuple[list[Node], dict[str, Callable[..., Any]]]:
    """``nodes`` without those that became a part of another one, and callables by name of the nodes that have one.

    ``known``: names of nodes that have one already, which stay as they are.

    Two neighbours become one node, the second, where nothing else reads the first and the second's other operand is a tensor. A sum
    and a norm of it become one node, the first, with both outputs. A product of two tensors that only a sum along axes reads becomes a
    part of that.
    """
    found: dict[str, Callable[..., Any]] = {}
    nodes = _sums_with_norms(graph, nodes, bodies, operator_of, found)
    nodes = _sums_of_products(graph, nodes, outputs, bodies, operator_of, found)
    by_output = {node.outputs[0]: node for node in nodes if len(node.outputs) == 1 and node.name not in known}
    merged: dict[str, Node] = {}
    gone: set[str] = set()
    for node in nodes:
        if node.name in found or node.name in known:
            continue
        alone = bodies(node.op) if node.op != LINEAR or is_of_weights(graph, node) else None
        if alone is not None:
            found[node.name] = _either(alone, operator_of(node.op))
            continue
        for first, other in _pairs(node, by_output):
            both = bodies(first.op, node.op)
            if both is not None and first.outputs[0] not in outputs and _only_reader(graph, first, node):
                found[node.name] = _either_pair(both, operator_of(first.op), operator_of(node.op))
                merged[node.name] = evolve(node, args=(first.args[0], other), kwargs=first.kwargs)
                gone.add(first.name)
                break
    return [merged.get(node.name, node) for node in nodes if node.name not in gone], found


def _sums_with_norms(graph: Graph, nodes: Sequence[Node], bodies: Bodies, operator_of: Callable[[str], Callable[..., Any]],
                     found: dict[str, Callable[..., Any]]) -> list[Node]:
    """``nodes`` where each sum of two tensors took in the first norm that reads it, and callables of those in ``found``."""
    both = {norm: body for norm in NORMS if (body := bodies(ADD, norm)) is not None}
    if not both:
        return list(nodes)
    made = {name for node in nodes for name in node.outputs}
    sums = {node.outputs[0]: node for node in nodes if node.op == ADD and not node.kwargs and _tensors(node.args, 2)}
    merged: dict[str, Node] = {}
    gone: set[str] = set()
    for node in nodes:
        first = sums.get(node.inputs[0]) if node.op in both and node.args[:1] == (Ref(node.inputs[0]),) else None
        early = all(name not in made for name in node.inputs[1:])  # what the norm reads beside the sum is there before it
        if first is None or first.name in merged or not early or written_between(graph, first.name, node.name):
            continue
        merged[first.name] = evolve(first, args=(*first.args, *node.args[1:]), kwargs=node.kwargs, outputs=(*first.outputs, *node.outputs))
        found[first.name] = _either_sum(both[node.op], operator_of(ADD), operator_of(node.op))
        gone.add(node.name)
    return [merged.get(node.name, node) for node in nodes if node.name not in gone]


def _sums_of_products(graph: Graph, nodes: Sequence[Node], outputs: Sequence[str], bodies: Bodies,
                      operator_of: Callable[[str], Callable[..., Any]], found: dict[str, Callable[..., Any]]) -> list[Node]:
    """``nodes`` where each sum along axes took in the product of two tensors that it alone reads, and callables of those in ``found``."""
    both = bodies(MULTIPLY, SUM)
    if both is None:
        return list(nodes)
    products = {node.outputs[0]: node for node in nodes if node.op == MULTIPLY and not node.kwargs and _tensors(node.args, 2)}
    merged: dict[str, Node] = {}
    gone: set[str] = set()
    for node in nodes:
        if node.op != SUM or node.kwargs or len(node.args) != 2 or not isinstance(node.args[0], Ref):
            continue
        first = products.get(node.args[0].value)
        if first is None or first.outputs[0] in outputs or not _only_reader(graph, first, node):
            continue
        merged[node.name] = evolve(node, args=(*first.args, node.args[1]))
        found[node.name] = _either_sum_of_products(both, operator_of(MULTIPLY), operator_of(SUM))
        gone.add(first.name)
    return [merged.get(node.name, node) for node in nodes if node.name not in gone]


def is_of_weights(graph: Graph, node: Node) -> bool:
    """Whether a product has a matrix, and all that it reads beside its rows are weights: those are there before anything runs."""
    values = [given.value for given in node.args[1:] if isinstance(given, Ref)]
    if not values or len(values) + 1 != len(node.args) or not isinstance(node.args[0], Ref) or node.kwargs:
        return False
    return len(graph.spec(values[0]).shape) == 2 and all(graph.kind_of(value) is ValueKind.WEIGHT for value in values)


def _tensors(arguments: Sequence[Any], count: int) -> bool:
    return len(arguments) == count and all(isinstance(argument, Ref) for argument in arguments)


def _pairs(node: Node, by_output: dict[str, Node]) -> list[tuple[Node, Ref]]:
    """For each of two operands what made it, where that takes one tensor and constants by name, and the other operand."""
    if not _tensors(node.args, 2) or node.kwargs or node.args[0] == node.args[1]:
        return []
    left, right = node.args
    pairs = [(by_output.get(a.value), b) for a, b in ((left, right), (right, left)) if isinstance(a, Ref) and isinstance(b, Ref)]
    return [(first, b) for first, b in pairs if first is not None and is_of_one(first)]


def is_of_one(node: Node) -> bool:
    """Whether a node makes one value of one other, and of constants by name."""
    plain = all(isinstance(given, str | int | float | None) for _, given in node.kwargs)
    return len(node.args) == 1 and isinstance(node.args[0], Ref) and len(node.outputs) == 1 and not node.mutates and plain


def _only_reader(graph: Graph, first: Node, second: Node) -> bool:
    readers = [user.name for user in graph.users.get(first.outputs[0], ())]
    return readers == [second.name] and first.outputs[0] not in graph.outputs and not written_between(graph, first.name, second.name)


def _either(body: Callable[..., Any], operator: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        found = body(*args, **kwargs)
        return operator(*args, **kwargs) if found is None else found

    return run


def _either_sum(body: Callable[..., Any], add: Callable[..., Any], norm: Callable[..., Any]) -> Callable[..., Any]:
    def run(left: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
        found = body(left, right, *args, **kwargs)
        if found is None:
            total = add(left, right)
            found = total, norm(total, *args, **kwargs)
        return found

    return run


def _either_sum_of_products(body: Callable[..., Any], multiply: Callable[..., Any], add: Callable[..., Any]) -> Callable[..., Any]:
    def run(left: Any, right: Any, axes: Any) -> Any:
        found = body(left, right, axes)
        return add(multiply(left, right), axes) if found is None else found

    return run


def _either_pair(body: Callable[..., Any], before: Callable[..., Any], after: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, other: Any, **how: Any) -> Any:
        found = body(x, other, **how)
        return after(before(x, **how), other) if found is None else found

    return run
