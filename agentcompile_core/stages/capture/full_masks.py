"""Masks that hide nothing are gone: those of routers that keep all groups of experts, say."""

from ...ir.graph import Argument, Graph, Node
from ...ops.schema import argument as argument_of
from .rewrite import View, eliminate_dead_code, lasting, rebuild, resolve_chain

_MAKERS = {"zeros_like": 0.0, "zeros": 0.0, "ones_like": 1.0, "ones": 1.0}
_KEEPING = ("cast", "view", "copy")
_NOT = ("aten.bitwise_not.default", "aten.logical_not.default")


def drop_full_masks(graph: Graph) -> Graph:
    """What a mask that is nowhere true would fill stays as it is.

    Before: ``masked_fill(x, bitwise_not(to(expand(scatter(zeros_like(g), 1, topk(g, 4)[1], 1)), bool)), -inf)`` of four groups g.
    After: x.
    """
    view = View(graph)
    same: dict[str, str] = {}
    for node in graph.nodes:
        hides = node.op not in ("aten.masked_fill.Scalar", "aten.masked_fill.Tensor") or _filled(view, node.args[1]) != 0.0
        if not hides and graph.spec(node.outputs[0]) == graph.spec(node.inputs[0]):
            same[node.outputs[0]] = node.inputs[0]
    renamed = lasting(graph, same)
    kept = [node for node in graph.nodes if not renamed.keys() & set(node.outputs)]
    return eliminate_dead_code(rebuild(graph, kept, resolve_chain(renamed))) if renamed else graph


def _filled(view: View, argument: Argument) -> float | None:
    """The number that all elements of a tensor are, where the graph says so."""
    node = view.node(argument)
    if node is None or node.mutates:
        return None
    name = node.op.split(".")[1]
    if name in _MAKERS:
        return _MAKERS[name]
    if node.op == "aten.scatter.value":
        number = argument_of(node, "value")
        return float(number) if isinstance(number, int | float) and _is_everywhere(view, node) else None
    if node.kind in _KEEPING:
        return _filled(view, node.args[0])
    given = _filled(view, node.args[0]) if node.op in _NOT and view.dtype(node.args[0]) == "bool" else None
    return None if given is None else float(not given)


def _is_everywhere(view: View, node: Node) -> bool:
    """Whether the indices of a scatter are those of a choice of as many as there are."""
    index = argument_of(node, "index")
    chosen = view.graph.producer.get(getattr(index, "value", ""))
    if chosen is None or chosen.op != "aten.topk.default" or chosen.outputs[1] != getattr(index, "value", ""):
        return False
    rank = len(view.shape(chosen.args[0]))
    axes = [argument_of(chosen, "dim"), argument_of(node, "dim")]
    same = all(isinstance(axis, int) and axis % rank == rank - 1 for axis in axes)
    return same and view.shape(node.args[0]) == view.shape(chosen.args[0]) == view.shape(index)
