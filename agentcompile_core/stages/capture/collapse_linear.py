"""Products with a transposed matrix, and parts picked out by constant indices, as the operators that the rest is made of."""

from attrs import evolve

from ...ir.graph import Argument, Graph, Node, Ref, ValueKind
from ...ops.schema import argument as argument_of
from ...ops.schema import canonical
from .rewrite import View, fuse

_TURNED = {"aten.t.default": (), "aten.numpy_T.default": (), "aten.mT.default": (), "aten.transpose.int": ("dim0", "dim1")}


def collapse_linear(graph: Graph) -> Graph:
    """One ``linear`` for a product with a transposed weight, a slice for a part at a constant index.

    Before: ``matmul(x, t(W))``; ``addmm(b, x, t(W))``; for one token ``index(x, [None, None, full([1], -2)])``.
    After: ``linear(x, W)``; ``linear(x, W, b)``; ``slice(x, 2, n - 2, n - 1)``.
    """
    view = View(graph)
    found = {node.name: new for node in graph.nodes if (new := _linear(view, node) or _part(view, node)) is not None}
    return fuse(graph, found) if found else graph


def _linear(view: View, node: Node) -> Node | None:
    if node.op in ("aten.matmul.default", "aten.mm.default"):
        x, weight, bias = node.args[0], _transposed(view, node.args[1]), None
    elif node.op == "aten.addmm.default" and argument_of(node, "alpha") == 1 and argument_of(node, "beta") == 1:
        x, weight, bias = node.args[1], _transposed(view, node.args[2]), node.args[0]
    else:
        return None
    if weight is None or view.shape(x)[-1:] != view.shape(weight)[1:] or (bias is not None and view.shape(bias) != view.shape(weight)[:1]):
        return None
    arguments = (x, weight) if bias is None else (x, weight, bias)
    return canonical(evolve(node, op="aten.linear.default", kind="linear", args=arguments, kwargs=()))


def _transposed(view: View, argument: Argument) -> Ref | None:
    """The two-dimensional weight under a transposition."""
    node = view.node(argument)
    if node is None or node.op not in _TURNED or not isinstance(node.args[0], Ref) or len(view.shape(node.args[0])) != 2:
        return None
    axes = {int(axis) % 2 for name in _TURNED[node.op] if isinstance(axis := argument_of(node, name), int)}
    owned = view.graph.kind_of(node.args[0].value) in (ValueKind.WEIGHT, ValueKind.CONSTANT)
    return node.args[0] if owned and axes in (set(), {0, 1}) else None


def _part(view: View, node: Node) -> Node | None:
    if node.op != "aten.index.Tensor" or view.graph.tokens != 1 or not isinstance(node.args[1], tuple) or not isinstance(node.args[0], Ref):
        return None
    places = [axis for axis, one in enumerate(node.args[1]) if one is not None]
    constant = view.node(node.args[1][places[0]], "aten.full.default") if len(places) == 1 else None
    if constant is None or argument_of(constant, "size") != (1,):
        return None
    axis, at, shape = places[0], argument_of(constant, "fill_value"), view.shape(node.args[0])
    # Behind axes of one element a part lies in order, as the copy does.
    if not isinstance(at, int) or any(extent != 1 for extent in shape[:axis]) or not -shape[axis] <= at < shape[axis]:
        return None
    at %= shape[axis]
    return canonical(evolve(node, op="aten.slice.Tensor", kind="view", args=(node.args[0], axis, at, at + 1), kwargs=()))
