"""Which operators compute every row by itself, and along which axis of their results the rows lie.

A rule is given a node and, for each operand that differs between rows, the axis along which they lie, and how many the node has and is to
have: one and several where a decode step serves several sequences, several and one where only one row of a prompt chunk is read.
It answers with the node for those. None: the node is not known to leave rows apart.
"""

from collections.abc import Callable, Mapping
from math import prod

from attrs import evolve, frozen

from ..ir.graph import Argument, Graph, Node, Ref, refs_of
from .operator_names import ATEN_LAYER_NORM, LAYER_NORM, LINEAR, RMS_NORM, ROPE, ROTARY
from .overloads import is_pointwise
from .schema import argument

Axes = Mapping[str, int]


@frozen(kw_only=True)
class Rows:
    """How many rows a node has, and how many it is to have; ``in_groups``: several places of an axis in a run may be one of them."""

    now: int
    wanted: int
    in_groups: bool = False

    def lie_along(self, extent: int) -> bool:
        """Whether an axis so long may be that of the rows."""
        return extent == self.now or (self.in_groups and extent > 0 and extent % self.now == 0)


@frozen(kw_only=True)
class Together:
    """``node`` for the rows that are wanted; of each of its results the ``axes`` along which they lie."""

    node: Node
    axes: tuple[int, ...]


def together(graph: Graph, node: Node, axes: Axes, rows: Rows, more: "Mapping[str, Rule] | None" = None) -> Together | None:
    """``node`` for ``rows``, whose operands have them along ``axes``; None where no rule knows the operator or this call of it.

    ``more``: rules by operator that the caller has besides.
    """
    name = node.op.split(".")[1]
    rule = (more or {}).get(node.op) or _RULES.get(node.op) or _RULES.get(name)
    if rule is not None:
        return rule(graph, node, axes, rows)
    return _pointwise(graph, node, axes, rows) if is_pointwise(node.op) and not node.mutates else None


def _pointwise(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    """All operands have the rows at one distance from the last axis, and what is shared has one element there."""
    behind = {len(graph.spec(name).shape) - axis for name, axis in axes.items()}
    out = graph.spec(node.outputs[0]).shape
    if len(behind) != 1 or len(node.outputs) != 1:
        return None
    axis = len(out) - behind.copy().pop()
    if axis < 0 or not rows.lie_along(out[axis]):
        return None
    others = [graph.spec(name).shape for name in node.inputs if name not in axes]
    if any(len(shape) >= len(out) - axis and shape[len(shape) - (len(out) - axis)] != 1 for shape in others):
        return None
    return Together(node=node, axes=(axis,))


def _over_last(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    """A product or norm over the last axis of its first operand; weights are shared."""
    first = node.args[0]
    if not isinstance(first, Ref) or set(axes) != {first.value} or axes[first.value] >= len(graph.spec(first.value).shape) - 1:
        return None
    return Together(node=node, axes=(axes[first.value],)) if _is_read_once(node, first.value) else None


def _is_read_once(node: Node, name: str) -> bool:
    """Whether one argument of a call is ``name``: what is its rows in one place is shared by all rows in another."""
    given = (*node.args, *(value for _, value in node.kwargs))
    return sum(one == name for argument_ in given for one in refs_of(argument_)) == 1


def _of_matrices(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    """A product of a matrix of rows and a shared one, with or without a shared row added."""
    first, bias = node.args[-2], node.args[0]
    two = node.op == "aten.mm.default"
    if len(node.args) != 3 - two or not isinstance(first, Ref) or dict(axes) != {first.value: 0} or node.kwargs:
        return None
    if not _is_read_once(node, first.value):
        return None
    alone = two or (isinstance(bias, Ref) and len(graph.spec(bias.value).shape) == 1)
    return Together(node=node, axes=(0,)) if alone else None


def _layer_norm(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    shape = argument(node, "normalized_shape")
    return _over_last(graph, node, axes, rows) if isinstance(shape, tuple) and len(shape) == 1 else None


def _rope(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    x, cos, sin = node.args[:3]
    wanted = {one.value: axis for one, axis in ((x, 2), (cos, 1), (sin, 1)) if isinstance(one, Ref)}
    return Together(node=node, axes=(2,)) if dict(axes) == wanted else None


def _rotary(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    first = node.args[0]
    return Together(node=node, axes=(1, 1)) if isinstance(first, Ref) and dict(axes) == {first.value: 1} else None


def _embedding(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    index = argument(node, "indices")
    if not isinstance(index, Ref) or set(axes) != {index.value}:
        return None
    return Together(node=node, axes=(axes[index.value],))


def reshaped(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    """Another shape of the same elements: the rows stay where as many elements lie before them."""
    (name, axis), = axes.items()
    source, result = graph.spec(name).shape, graph.spec(node.outputs[0]).shape
    if graph.spec(name).dtype is not graph.spec(node.outputs[0]).dtype:  # other elements of the same bytes
        return None
    before = prod(source[:axis])
    found = [i for i in range(len(result)) if rows.lie_along(result[i]) and prod(result[:i]) == before]
    if not found:
        return None
    # Hidden states have rows along axis 1, as sums of them want it.
    place = 1 if 1 in found and len(result) > 2 else axis if axis in found else found[-1]
    sizes = (*result[:place], result[place] // rows.now * rows.wanted, *result[place + 1 :])
    # Rows of one axis may lie apart in memory where a single one did not.
    return Together(node=evolve(node, op="aten.reshape.default", args=(Ref(name), sizes), kwargs=()), axes=(place,))


def _swapped(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    (name, axis), = axes.items()
    order = list(range(len(graph.spec(name).shape)))
    if node.op == "aten.permute.default":
        dims = argument(node, "dims")
        order = [int(one) % len(order) for one in dims] if isinstance(dims, tuple) else order  # type: ignore[arg-type]
    else:
        first, second = (_axis(argument(node, one), len(order)) for one in ("dim0", "dim1"))
        order[first], order[second] = order[second], order[first]
    return Together(node=node, axes=(order.index(axis),))


def _unsqueeze(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    (name, axis), = axes.items()
    place = _axis(argument(node, "dim"), len(graph.spec(name).shape) + 1)
    return Together(node=node, axes=(axis + (place <= axis),))


def _along_another(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    """Parts of a value, or several behind each other, along an axis that is not that of the rows."""
    found = set(axes.values())
    rank = len(graph.spec(next(iter(axes))).shape)
    if len(found) != 1 or set(axes) != set(node.inputs) or found == {_axis(argument(node, "dim"), rank)}:
        return None
    return Together(node=node, axes=tuple(found) * len(node.outputs))


def _same(graph: Graph, node: Node, axes: Axes, rows: Rows) -> Together | None:
    return Together(node=node, axes=tuple(axes.values())) if len(axes) == 1 and len(node.outputs) == 1 else None


def _axis(given: Argument, rank: int) -> int:
    assert isinstance(given, int)
    return given % rank


Rule = Callable[[Graph, Node, Axes, Rows], Together | None]
_RULES: dict[str, Rule] = {
    LINEAR: _over_last, RMS_NORM: _over_last, LAYER_NORM: _over_last,
    ATEN_LAYER_NORM: _layer_norm, ROPE: _rope, ROTARY: _rotary,
    "aten.mm.default": _of_matrices, "aten.addmm.default": _of_matrices, "aten.embedding.default": _embedding,
    "view": reshaped, "reshape": reshaped, "_unsafe_view": reshaped,
    "aten.transpose.int": _swapped, "aten.permute.default": _swapped, "unsqueeze": _unsqueeze, "aten.slice.Tensor": _along_another,
    "aten.split.Tensor": _along_another,
    "aten.split_with_sizes.default": _along_another, "aten.chunk.default": _along_another, "aten.cat.default": _along_another,
    "contiguous": _same, "clone": _same,
}
