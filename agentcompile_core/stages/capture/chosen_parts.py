"""Tensors of which a part is added to, as a choice element by element, which a kernel makes in one launch."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from attrs import evolve, frozen

from ...ir.graph import Argument, DType, Graph, Node, Ref, Symbol, TensorSpec, Value
from ...ops.region_view import is_contiguous
from ...ops.schema import argument as argument_of
from ...ops.schema import canonical
from .rewrite import View, beside, eliminate_dead_code, rebuild

_COMPUTED = ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor")
FEWEST = 4  # places where elements are chosen alike: what says which they are takes three launches


@frozen
class _Changed:
    """``whole`` of which the elements ``first`` to ``end`` along ``axis`` are what ``change`` makes of them."""

    whole: str
    axis: int
    first: int
    end: int
    change: Node


def choose_parts(graph: Graph) -> Graph:
    """For one token, what is computed of a part of a tensor is computed of all of it, and taken where the part is.

    Before, in every layer: ``cat([slice(x, 0, 0, 1), add(slice(x, 0, 1, 4), y)])`` of an x [4, 1, H] and a y [1, H].
    After: ``where(gt(part, 0.5), add(x, y), x)``, and in front of all ``part = cat([full([1, 1, 1], 0), full([3, 1, 1], 1)])``.
    """
    view = View(graph)
    found = {node.name: changed for node in graph.nodes if (changed := _changed(view, node)) is not None} if graph.tokens == 1 else {}
    alike: dict[tuple[tuple[int, ...], DType, int, int, int], list[str]] = defaultdict(list)
    for name, one in found.items():
        spec = graph.spec(one.whole)
        shape = tuple(extent if axis == one.axis else 1 for axis, extent in enumerate(spec.shape))
        alike[shape, spec.dtype, one.axis, one.first, one.end].append(name)
    front: list[Node] = []
    values: list[Value] = []
    made: dict[str, list[Node]] = {}
    for number, ((shape, dtype, axis, first, end), names) in enumerate(alike.items()):
        if len(names) < FEWEST:
            continue
        part = f"chosen.{number}"
        front += _said(part, shape, dtype, axis, (first, end), values)
        for name in names:
            made[name] = _choice(graph, graph.node_by_name[name], found[name], part, values)
    if not made:
        return graph
    nodes = [*front, *(one for node in graph.nodes for one in made.get(node.name, [node]))]
    return eliminate_dead_code(rebuild(evolve(graph, values=(*graph.values, *values)), nodes))


def _changed(view: View, node: Node) -> _Changed | None:
    """What a concatenation is, where all of it but one part is a tensor as it was, and that part is computed of it."""
    pieces, axis = (node.args[0], argument_of(node, "dim")) if node.op == "aten.cat.default" and node.args else (None, None)
    if not isinstance(pieces, tuple) or not isinstance(axis, int) or not 2 <= len(pieces) <= 3:
        return None
    result = view.graph.spec(node.outputs[0])
    axis %= len(result.shape)
    for piece in pieces:
        change = view.node(piece)
        if change is None or change.op not in _COMPUTED or not view.private([change], node) or not result.dtype.is_float:
            continue
        ends = [_cut(view, change.args[0] if one is piece else one, axis) for one in pieces]
        if any(end is None or end[0] != ends[0][0] for end in ends if ends[0] is not None) or ends[0] is None:  # type: ignore[index]
            continue
        bounds = [(end[1], end[2]) for end in ends if end is not None]
        tiled = bounds[0][0] == 0 and all(one[1] == other[0] for one, other in pairwise(bounds))
        whole, (first, end) = ends[0][0], bounds[pieces.index(piece)]
        same = view.graph.spec(whole) == result and is_contiguous(result)
        if tiled and same and bounds[-1][1] == result.shape[axis] and _is_alike_along(view, change, axis, result):
            return _Changed(whole, axis, first, end, change)
    return None


def _cut(view: View, piece: Argument, axis: int) -> tuple[str, int, int] | None:
    """(whole, first, end) of a slice along ``axis``."""
    cut = view.node(piece, "aten.slice.Tensor")
    if cut is None or argument_of(cut, "step") != 1 or view.dim(cut) != axis or not isinstance(cut.args[0], Ref):
        return None
    extent = view.shape(cut.args[0])[axis]
    first, end = argument_of(cut, "start"), argument_of(cut, "end")
    first, end = 0 if first is None else first, extent if end is None else end
    if not isinstance(first, int) or not isinstance(end, int):
        return None
    first, end = (min(max(at + extent if at < 0 else at, 0), extent) for at in (first, end))
    return cut.args[0].value, first, end


def _is_alike_along(view: View, change: Node, axis: int, result: TensorSpec) -> bool:
    """Whether the other operand of ``change`` is a number, or the same for all elements along ``axis``."""
    other = change.args[1]
    if not isinstance(other, Ref):
        return True
    spec, behind = view.graph.spec(other.value), len(result.shape) - axis
    repeats = len(spec.shape) <= len(result.shape) and (len(spec.shape) < behind or spec.shape[len(spec.shape) - behind] == 1)
    return repeats and spec.dtype is result.dtype and other != change.args[0]


def _said(part: str, shape: Sequence[int], dtype: DType, axis: int, bounds: tuple[int, int], values: list[Value]) -> list[Node]:
    """The nodes that make ``part``: 1 where a tensor is changed along ``axis``, else 0."""
    first, end = bounds
    kwargs = (("dtype", Symbol("dtype", dtype.value)), ("device", Symbol("device", "model")))
    nodes: list[Node] = []
    for index, (count, number) in enumerate(((first, 0.0), (end - first, 1.0), (shape[axis] - end, 0.0))):
        if count:
            name, extents = f"{part}.{index}", tuple(count if at == axis else 1 for at in range(len(shape)))
            full = Node(name=name, op="aten.full.default", kind="full", args=(extents, number), kwargs=kwargs, outputs=(name,))
            nodes.append(canonical(full))
            values.append(Value(name=name, spec=TensorSpec(shape=extents, dtype=dtype)))
    pieces = tuple(Ref(node.name) for node in nodes)
    values.append(Value(name=part, spec=TensorSpec(shape=tuple(shape), dtype=dtype)))
    return [*nodes, canonical(Node(name=part, op="aten.cat.default", kind="cat", args=(pieces, axis), outputs=(part,)))]


def _choice(graph: Graph, node: Node, changed: _Changed, part: str, values: list[Value]) -> list[Node]:
    whole, chosen, total = graph.spec(changed.whole), f"{node.name}.chosen", f"{node.name}.total"
    shape = tuple(extent if axis == changed.axis else 1 for axis, extent in enumerate(whole.shape))
    values += [Value(name=chosen, spec=TensorSpec(shape=shape, dtype=DType.BOOL)), Value(name=total, spec=whole)]
    change = evolve(changed.change, name=total, args=(Ref(changed.whole), *changed.change.args[1:]), outputs=(total,))
    return [beside(node, chosen, "aten.gt.Scalar", "gt", (Ref(part), 0.5)), change,
            beside(node, node.name, "aten.where.self", "where", (Ref(chosen), Ref(total), Ref(changed.whole)), node.outputs)]
