"""Two products of the same rows, of which one is gated by the activation of the other, as one call of the device."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ..ir.graph import Graph, Node, Ref
from .bodies import LINEAR, Bodies, is_of_weights, written_between
from .joint_products import ProductMemory, joint, lie_behind

if TYPE_CHECKING:
    from torch import Tensor

SILU, MULTIPLY = "aten.silu.default", "aten.mul.Tensor"


@frozen(kw_only=True)
class _Gated:
    """The nodes of ``silu(linear(x, gate)) * linear(x, up)``, in whatever order the graph has them."""

    gate: Node
    activation: Node
    up: Node
    product: Node


def with_gated_products(graph: Graph, nodes: Sequence[Node], outputs: Collection[str], bodies: Bodies,
                        memory: ProductMemory) -> tuple[list[Node], dict[str, Callable[..., Any]]]:
    """``nodes`` where each such four are the last one, a call of the rows alone, and callables of those by name.

    ``outputs``: values that somebody else reads. Rows that the device's body does not serve go through one product with both weights,
    where these lie behind each other, and the body of the other two.
    """
    body = bodies(LINEAR, SILU, MULTIPLY)
    if body is None:
        return list(nodes), {}
    found: dict[str, Callable[..., Any]] = {}
    merged: dict[str, Node] = {}
    gone: set[str] = set()
    made = {node.outputs[0]: node for node in nodes if len(node.outputs) == 1}
    for node in nodes:
        four = _gated(graph, node, made, outputs)
        if four is None:
            continue
        weights = [memory.weights[_value(one.args[1])] for one in (four.gate, four.up)]
        found[node.name] = _call(body, bodies(SILU, MULTIPLY), *weights)
        merged[node.name] = evolve(node, args=four.gate.args[:1])
        gone |= {four.gate.name, four.activation.name, four.up.name}
    return [merged.get(node.name, node) for node in nodes if node.name not in gone], found


def _gated(graph: Graph, product: Node, made: Mapping[str, Node], outputs: Collection[str]) -> _Gated | None:
    if product.op != MULTIPLY or product.kwargs or len(product.args) != 2 or not all(isinstance(one, Ref) for one in product.args):
        return None
    for left, right in (product.args, product.args[::-1]):
        activation, up = made.get(_value(left)), made.get(_value(right))
        if activation is None or up is None or activation.op != SILU or activation.kwargs or not isinstance(activation.args[0], Ref):
            continue
        gate = made.get(_value(activation.args[0]))
        if gate is None or not _is_plain(graph, gate) or not _is_plain(graph, up) or gate.args[0] != up.args[0]:
            continue
        four = _Gated(gate=gate, activation=activation, up=up, product=product)
        readers = ((gate, activation), (activation, product), (up, product))
        alone = all([user.name for user in graph.users.get(one.outputs[0], ())] == [reader.name] for one, reader in readers)
        seen = {one.outputs[0] for one, _ in readers}.intersection((*outputs, *graph.outputs))
        if alone and not seen and not any(written_between(graph, one, product) for one in (gate, up)):
            return four
    return None


def _is_plain(graph: Graph, node: Node) -> bool:
    return node.op == LINEAR and len(node.args) == 2 and is_of_weights(graph, node)


def _value(given: object) -> str:
    assert isinstance(given, Ref)
    return given.value


def _call(body: Callable[..., Any], gated: Callable[..., Any] | None, gate: "Tensor", up: "Tensor") -> Callable[..., Any]:
    from torch.nn.functional import linear, silu

    turned = lie_behind(up, gate)
    both = joint([[up, gate] if turned else [gate, up]]) if turned or lie_behind(gate, up) else None

    def run(x: "Tensor") -> Any:
        found = body(x, gate, up)
        if found is None:
            left, right = both(x)[:: -1 if turned else 1] if both is not None else (linear(x, gate), linear(x, up))
            found = gated(left, right) if gated is not None else None
            found = silu(left) * right if found is None else found
        return found

    return run
