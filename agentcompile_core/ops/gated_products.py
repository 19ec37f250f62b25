"""Two products of the same rows, of which one is gated by the activation of the other, as one call of the device."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ..ir.graph import Graph, Node, Ref
from .bodies import Bodies, is_of_one, is_of_weights
from .joint_products import Memory, joint, lie_behind
from .operator_names import LINEAR, MULTIPLY, operator
from .schema import named
from .write_order import written_between

if TYPE_CHECKING:
    from torch import Tensor

_PARTS = frozenset({"chunk", "split", "split_with_sizes"})


@frozen(kw_only=True)
class _Factor:
    """A product of ``rows`` with a weight, or those of its columns from ``first`` to ``last`` that a chunk or split takes."""

    rows: Ref
    weight: str
    first: int
    last: int
    nodes: tuple[Node, ...]

    def matrix(self, weights: "Mapping[str, Tensor]") -> "Tensor":
        """The rows of the weight that make these columns."""
        return weights[self.weight][self.first:self.last]


@frozen(kw_only=True)
class _Gated:
    """The nodes of ``activation(linear(x, gate)) * linear(x, up)``, in whatever order the graph has them."""

    gate: _Factor
    activation: Node
    up: _Factor

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All but the multiplication."""
        return (*self.gate.nodes, self.activation, *self.up.nodes)


def with_gated_products(graph: Graph, nodes: Sequence[Node], outputs: Collection[str], bodies: Bodies, memory: Memory,
                        operator_of: Callable[[str], Callable[..., Any]]) -> tuple[list[Node], dict[str, Callable[..., Any]]]:
    """``nodes`` where each such pair of products is one node, a call of the rows alone, and callables of those by name.

    ``outputs``: values that somebody else reads. Rows that the device's body does not serve go through one product with both weights,
    where these lie behind each other, and the body of the other two.
    """
    found: dict[str, Callable[..., Any]] = {}
    merged: dict[str, Node] = {}
    gone: set[str] = set()
    made = {output: node for node in nodes for output in node.outputs}
    for node in nodes:
        gated = _gated(graph, node, made, outputs)
        body = None if gated is None else bodies(LINEAR, gated.activation.op, MULTIPLY)
        if gated is None or body is None:
            continue
        act, how = operator_of(gated.activation.op), dict(gated.activation.kwargs)
        weights = gated.gate.matrix(memory.weights), gated.up.matrix(memory.weights)
        found[node.name] = _call((body, bodies(gated.activation.op, MULTIPLY), act), how, *weights)
        merged[node.name] = evolve(node, args=(gated.gate.rows,))
        gone |= {one.name for one in gated.nodes}
    return [merged.get(node.name, node) for node in nodes if node.name not in gone], found


def _gated(graph: Graph, product: Node, made: Mapping[str, Node], outputs: Collection[str]) -> _Gated | None:
    if product.op != MULTIPLY or product.kwargs or len(product.args) != 2 or not all(isinstance(one, Ref) for one in product.args):
        return None
    for left, right in (product.args, product.args[::-1]):
        activation = made.get(_value(left))
        if activation is None or not is_of_one(activation) or activation.args[0] == right:
            continue
        gate, up = (_factor(graph, _value(given), made) for given in (activation.args[0], right))
        if gate is None or up is None or gate.rows != up.rows or gate.last - gate.first != up.last - up.first:
            continue
        found = _Gated(gate=gate, activation=activation, up=up)
        written = any(written_between(graph, one.nodes[0].name, product.name) for one in (gate, up))
        if not written and _is_alone(graph, found, product, outputs):
            return found
    return None


def _factor(graph: Graph, value: str, made: Mapping[str, Node]) -> _Factor | None:
    node = made.get(value)
    if node is None:
        return None
    if _is_plain(graph, node):
        return _Factor(rows=_ref(node), weight=_value(node.args[1]), first=0, last=graph.spec(value).shape[-1], nodes=(node,))
    whole = made.get(_value(node.args[0])) if node.args and isinstance(node.args[0], Ref) else None
    if whole is None or operator(node)[0] not in _PARTS or not _is_plain(graph, whole):
        return None
    axes = len(graph.spec(value).shape)
    if named(node.op, node.args, dict(node.kwargs)).get("dim", 0) not in (-1, axes - 1):
        return None
    first = sum(graph.spec(output).shape[-1] for output in node.outputs[:node.outputs.index(value)])
    return _Factor(rows=_ref(whole), weight=_value(whole.args[1]), first=first, last=first + graph.spec(value).shape[-1],
                   nodes=(whole, node))


def _is_alone(graph: Graph, gated: _Gated, product: Node, outputs: Collection[str]) -> bool:
    """Whether nobody but these nodes reads what lies between the rows and the result."""
    readers = {product.name, *(one.name for one in gated.nodes)}
    between = {output for one in gated.nodes for output in one.outputs}
    read = all(user.name in readers for value in between for user in graph.users.get(value, ()))
    return read and not between.intersection((*outputs, *graph.outputs))


def _is_plain(graph: Graph, node: Node) -> bool:
    """Whether a node is a product with weights and without a bias."""
    return node.op == LINEAR and len(node.args) == 2 and is_of_weights(graph, node)


def _ref(node: Node) -> Ref:
    given = node.args[0]
    assert isinstance(given, Ref)
    return given


def _value(given: object) -> str:
    assert isinstance(given, Ref)
    return given.value


def _call(on_device: "tuple[Callable[..., Any], Callable[..., Any] | None, Callable[..., Any]]", how: Mapping[str, Any], gate: "Tensor",
          up: "Tensor") -> Callable[..., Any]:
    """``on_device``: what serves all of it, what serves the gate of two results, and the activation; ``how`` is what that takes by name."""
    from torch.nn.functional import linear

    body, gated, act = on_device
    turned = lie_behind(up, gate)
    both = joint([[up, gate] if turned else [gate, up]]) if turned or lie_behind(gate, up) else None

    def run(x: "Tensor") -> Any:
        found = body(x, gate, up, **how)
        if found is None:
            left, right = both(x)[:: -1 if turned else 1] if both is not None else (linear(x, gate), linear(x, up))
            found = gated(left, right, **how) if gated is not None else None
            found = act(left, **how) * right if found is None else found
        return found

    return run
