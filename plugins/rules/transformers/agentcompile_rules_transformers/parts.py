"""Copies of parts that lie apart in a tensor, with the views that say which part."""

from collections.abc import Iterator

from agentcompile_core.plugin_api import (
    ELEMENTWISE,
    KERNEL_TYPES,
    Match,
    Node,
    RegionView,
    Scalar,
    SemanticLabel,
    TensorSpec,
    argument,
    is_contiguous,
    operator_names,
)

AXES = 4
COPIES = ("aten.contiguous.default", "aten.clone.default")
_TURNS = tuple(f"aten.{name}" for name in (  # begin where their operand does
    "transpose.int", "permute.default", "reshape.default", "view.default", "t.default", "mT.default", "numpy_T.default",
    "unsqueeze.default", "squeeze.dim", "squeeze.default", "expand.default", "unflatten.int"))


def parts(view: RegionView) -> Iterator[Match]:
    """``elementwise`` matches of one strided input: each copy of a slice, a row or a transposition of at most four axes."""
    for node in view.graph.nodes:
        if node.op in COPIES and is_contiguous(view.graph.spec(node.outputs[0])):
            match = _part(view, node)
            if match is not None:
                yield match


def _part(view: RegionView, copy: Node) -> Match | None:
    given, made = view.graph.spec(copy.inputs[0]), view.graph.spec(copy.outputs[0])
    if is_contiguous(given) or given.dtype not in KERNEL_TYPES or given.dtype is not made.dtype:
        return None
    taken = [copy.name]
    whole = whole_of(view, copy.inputs[0], taken)
    axes = _axes(given)
    if axes is None or whole is None:
        return None
    value, offset = whole
    attributes: list[tuple[str, Scalar]] = [("count", made.numel), ("columns", made.shape[-1]), ("broadcast0", "strided"),
                                            ("offset", offset)]
    attributes += [item for axis, (extent, stride) in enumerate(axes) for item in ((f"extent{axis}", extent), (f"stride{axis}", stride))]
    return Match(kind=ELEMENTWISE, label=SemanticLabel.ELEMENTWISE, nodes=view.deps.members(view.deps.mask(taken)),
                 operands=(view.read("in0", value), view.write("out", copy.outputs[0])), attributes=tuple(attributes))


def whole_of(view: RegionView, value: str, taken: list[str]) -> tuple[str, int] | None:
    """The contiguous value that ``value`` is a part of, and its first element there; the views on the way go into ``taken``.

    None where one of them is read by others than the nodes of ``taken``, or where a part begins is not known.
    """
    first = 0
    while not is_contiguous(view.graph.spec(value)):
        node = view.producer(value)
        own = node is not None and all(view.only_used_by(out, set(taken)) for out in node.outputs)
        step = offset_of(view, node, value) if node is not None and own else None
        if node is None or step is None:
            return None
        first += step
        taken += [node.name] if node.name not in taken else []
        value = node.inputs[0]
    return value, first


def offset_of(view: RegionView, node: Node, value: str) -> int | None:
    """By how many elements ``value``, a result of a view, begins behind its operand; None where that is not known."""
    if node.op in _TURNS:
        return 0
    if node.op in operator_names.SPLITS:
        axis = argument(node, "dim")
        before = node.outputs[: node.outputs.index(value)]
        given = view.graph.spec(node.inputs[0])
        return sum(view.graph.spec(out).shape[axis] for out in before) * strides_of(given)[axis] if isinstance(axis, int) else None
    if node.op not in ("aten.slice.Tensor", "aten.select.int"):
        return None
    spec = view.graph.spec(node.inputs[0])
    axis, at = argument(node, "dim"), argument(node, "start" if node.op == "aten.slice.Tensor" else "index")
    at = 0 if at is None else at
    if not isinstance(axis, int) or not isinstance(at, int):
        return None
    extent = spec.shape[axis]
    return min(max(at + extent if at < 0 else at, 0), extent) * strides_of(spec)[axis]


def strides_of(spec: TensorSpec) -> tuple[int, ...]:
    """Strides in elements, those of a contiguous tensor included."""
    if spec.strides:
        return spec.strides
    found, step = [], 1
    for extent in reversed(spec.shape):
        found.append(step)
        step *= extent
    return tuple(reversed(found))


def _axes(spec: TensorSpec) -> list[tuple[int, int]] | None:
    """Extents and strides of the axes of more than one element, filled up to four in front; None where there are more."""
    axes = [(extent, stride) for extent, stride in zip(spec.shape, strides_of(spec), strict=True) if extent != 1]
    return [(1, 0)] * (AXES - len(axes)) + axes if len(axes) <= AXES else None
