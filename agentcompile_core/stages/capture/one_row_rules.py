"""More operators that compute every row of a prompt chunk by itself: what is summed or chosen along another axis, and experts.

Beside those of ``ops/row_axes.py``, whose nodes also serve rows of several sequences at once; these do not.
"""

from ...ir.graph import Argument, Graph, Node, Ref
from ...ops.operator_names import EXPERT_LINEAR
from ...ops.row_axes import Axes, Rows, Rule, Together, reshaped
from ...ops.schema import argument


def _reduced(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    """What is put together along other axes than that of the rows, which are kept or gone."""
    (name, axis), = axes.items()
    rank, dims = len(graph.spec(name).shape), argument(node, "dim")
    given = dims if isinstance(dims, tuple) else (dims,)
    found = {one % rank for one in given if isinstance(one, int)}
    if len(node.inputs) != 1 or not found or axis in found or len(found) != len(given):
        return None
    kept = argument(node, "keepdim")
    return Together(node=node, axes=(axis if kept else axis - sum(one < axis for one in found),) * len(node.outputs))


def _beside(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    """What goes along an axis that is not that of the rows, and leaves all axes where they are; every operand has the rows."""
    found = set(axes.values())
    ranks = {len(graph.spec(name).shape) for name in node.inputs}
    dim = argument(node, "dim")
    if set(axes) != set(node.inputs) or len(found) != 1 or len(ranks) != 1 or not isinstance(dim, int) or {dim % max(ranks)} == found:
        return None
    return Together(node=node, axes=tuple(found) * len(node.outputs))


def _chosen_along(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    """One place of another axis, which goes."""
    (name, axis), = axes.items()
    place = _place(argument(node, "dim"), len(graph.spec(name).shape))
    if len(node.inputs) != 1 or place is None or place == axis:
        return None
    return Together(node=node, axes=(axis - (place < axis),))


def _stacked(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    """Several values along a new axis."""
    found, place = set(axes.values()), _place(argument(node, "dim"), len(graph.spec(node.outputs[0]).shape))
    if set(axes) != set(node.inputs) or len(found) != 1 or place is None:
        return None
    axis = found.pop()
    return Together(node=node, axes=(axis + (place <= axis),))


def _alike(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    """A value of the size of another."""
    return Together(node=node, axes=tuple(axes.values())) if len(axes) == len(node.inputs) == 1 else None


def _product(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    """Rows times a matrix, or a vector, that all of them share."""
    first, second = node.args
    if not isinstance(first, Ref) or not isinstance(second, Ref) or first == second or set(axes) != {first.value}:
        return None
    shared = len(graph.spec(second.value).shape) <= 2 and axes[first.value] < len(graph.spec(first.value).shape) - 1
    return Together(node=node, axes=(axes[first.value],)) if shared else None


def _by_experts(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    """Rows of a mixture of experts: each has its own choice of them."""
    x, experts = argument(node, "x"), argument(node, "experts")
    both = isinstance(x, Ref) and isinstance(experts, Ref) and x != experts and dict(axes) == {x.value: 0, experts.value: 0}
    return Together(node=node, axes=(0,)) if both else None


def _place(given: Argument, rank: int) -> int | None:
    return given % rank if isinstance(given, int) and rank else None


RULES: dict[str, Rule] = {
    "aten.sum.dim_IntList": _reduced, "aten.mean.dim": _reduced, "aten.amax.default": _reduced, "aten.amin.default": _reduced,
    "aten.softmax.int": _beside, "aten._softmax.default": _beside, "aten.log_softmax.int": _beside, "aten.topk.default": _beside,
    "aten.sort.default": _beside, "aten.sort.stable": _beside, "aten.gather.default": _beside, "aten.scatter.src": _beside,
    "aten.scatter.value": _beside, "aten.cumsum.default": _beside,
    "aten.concat.default": _beside, "aten.stack.default": _stacked, "aten.unflatten.int": reshaped, "aten.flatten.using_ints": reshaped,
    "aten.argsort.default": _beside, "aten.zeros_like.default": _alike, "aten.ones_like.default": _alike, "aten.full_like.default": _alike,
    "aten.matmul.default": _product, "aten.select.int": _chosen_along, "aten.squeeze.dim": reshaped, EXPERT_LINEAR: _by_experts,
}
