"""Products of a parameter and a turned row are linear layers of the row."""

from attrs import evolve

from ...ir.graph import Argument, Graph, Node, Ref, TensorSpec, Value, ValueKind
from .rewrite import View, beside, rebuild

_TURNED = ("aten.transpose.int", "aten.mT.default")


def turn_products(graph: Graph) -> Graph:
    """For one token, the product of a parameter and a turned row is the linear layer of the row, turned.

    Before: ``matmul(W, transpose(x, 1, 2))`` of a parameter W [N, K] and an x [1, 1, K].
    After: ``transpose(linear(x, W), 1, 2)``.
    """
    view, nodes, values = View(graph), list[Node](), list[Value]()
    for node in graph.nodes:
        x = _row(view, node)
        if x is None:
            nodes.append(node)
            continue
        name, spec = f"{node.name}.row", graph.spec(node.outputs[0])
        values.append(Value(name=name, spec=TensorSpec(shape=(1, 1, spec.shape[1]), dtype=spec.dtype)))
        nodes.append(beside(node, name, "aten.linear.default", "linear", (x, node.args[0])))
        nodes.append(beside(node, node.name, "aten.transpose.int", "view", (Ref(name), 1, 2), node.outputs))
    return rebuild(evolve(graph, values=(*graph.values, *values)), nodes) if values else graph


def _row(view: View, node: Node) -> Argument:
    """The row [1, 1, K] that ``node`` multiplies, turned, with a parameter from the left; None: it is no such product."""
    weight = node.args[0] if node.op == "aten.matmul.default" else None
    if not isinstance(weight, Ref) or view.graph.kind_of(weight.value) is not ValueKind.WEIGHT or len(view.shape(weight)) != 2:
        return None
    turned = view.node(node.args[1])
    # The product asks for K elements along the axis before the last: the axes that are turned are (1, 2), or K is 1.
    return turned.args[0] if turned and turned.op in _TURNED and view.shape(turned.args[0]) == (1, 1, view.shape(weight)[1]) else None
