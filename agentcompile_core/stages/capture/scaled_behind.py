"""Linear layers whose operand is scaled by one number scale their results instead, so that nothing lies between a norm and its reader."""

from attrs import evolve

from ...ir.graph import DType, Graph, Node, Ref, Value, ValueKind
from ...ops.operator_names import NORMS
from ...ops.region_view import is_contiguous
from ...ops.schema import argument as argument_of
from .rewrite import View, beside, eliminate_dead_code, rebuild

_NORMS = (*NORMS, "aten.rms_norm.default")
_RANGES = (DType.BF16, DType.F32)  # what was scaled to stay small could leave the range of fp16


def scale_behind(graph: Graph) -> Graph:
    """For one token, a number that a model holds is multiplied with the few results of a layer and not with its many operands.

    Before: ``linear(mul(rms_norm(x, w), s), W)`` of an s [] that the model holds, and a W [4, 2048].
    After: ``mul(linear(rms_norm(x, w), W), s)``.
    Only behind a norm, whose results are near one whatever was normed: those of the layer leave the type's range where W does, and not
    where s had kept them in it.
    """
    view, nodes, values = View(graph), list[Node](), list[Value]()
    for node in graph.nodes:
        scaled = _scaled(view, node) if graph.tokens == 1 else None
        if scaled is None:
            nodes.append(node)
            continue
        x, number = scaled
        name = f"{node.name}.unscaled"
        values.append(Value(name=name, spec=graph.spec(node.outputs[0])))
        nodes.append(evolve(node, name=name, args=(x, *node.args[1:]), outputs=(name,)))
        nodes.append(beside(node, node.name, "aten.mul.Tensor", "mul", (Ref(name), number), node.outputs))
    if not values:
        return graph
    return eliminate_dead_code(rebuild(evolve(graph, values=(*graph.values, *values)), nodes))


def _scaled(view: View, node: Node) -> tuple[Ref, Ref] | None:
    """What the operand of a layer is, and the number it is times; None where it is no such product, or more is made than is read."""
    if node.op != "aten.linear.default" or argument_of(node, "bias") is not None:
        return None
    product, result = view.node(node.args[0], "aten.mul.Tensor"), view.graph.spec(node.outputs[0])
    if product is None or not view.private([product], node) or result.dtype not in _RANGES or len(product.args) != 2:
        return None
    for x, number in (product.args, product.args[::-1]):
        if not isinstance(x, Ref) or not isinstance(number, Ref):
            continue
        given, single = view.graph.spec(x.value), view.graph.spec(number.value)
        normed = (maker := view.node(x)) is not None and maker.op in _NORMS
        held = view.graph.kind_of(number.value) in (ValueKind.CONSTANT, ValueKind.WEIGHT) and not single.shape
        same = given == view.graph.spec(product.outputs[0]) and is_contiguous(given) and single.dtype is given.dtype is result.dtype
        if normed and held and same and result.numel < given.numel:
            return x, number
    return None
