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
)

AXES = 4
_COPIES = ("aten.contiguous.default", "aten.clone.default")
_TURNS = tuple(f"aten.{name}" for name in (  # begin where their operand does
    "transpose.int", "permute.default", "reshape.default", "view.default", "t.default", "mT.default", "numpy_T.default",
    "unsqueeze.default", "squeeze.dim", "squeeze.default", "expand.default", "unflatten.int"))


def parts(view: RegionView) -> Iterator[Match]:
    """``elementwise`` matches of one strided input: each copy of a slice, a row or a transposition of at most four axes."""
    for node in view.graph.nodes:
        if node.op in _COPIES and is_contiguous(view.graph.spec(node.outputs[0])):
            match = _part(view, node)
            if match is not None:
                yield match


def _part(view: RegionView, copy: Node) -> Match | None:
    given, made = view.graph.spec(copy.inputs[0]), view.graph.spec(copy.outputs[0])
    if is_contiguous(given) or given.dtype not in KERNEL_TYPES or given.dtype is not made.dtype:
        return None
    value, taken, offset = copy.inputs[0], [copy.name], 0
    while not is_contiguous(view.graph.spec(value)):
        node = view.producer(value)
        step = offset_of(view, node) if node is not None and view.only_used_by(value, set(taken)) else None
        if node is None or step is None:
            return None
        offset += step
        taken.append(node.name)
        value = node.inputs[0]
    axes = _axes(given)
    if axes is None:
        return None
    attributes: list[tuple[str, Scalar]] = [("count", made.numel), ("columns", made.shape[-1]), ("broadcast0", "strided"),
                                            ("offset", offset)]
    attributes += [item for axis, (extent, stride) in enumerate(axes) for item in ((f"extent{axis}", extent), (f"stride{axis}", stride))]
    return Match(kind=ELEMENTWISE, label=SemanticLabel.ELEMENTWISE, nodes=view.deps.members(view.deps.mask(taken)),
                 operands=(view.read("in0", value), view.write("out", copy.outputs[0])), attributes=tuple(attributes))


def offset_of(view: RegionView, node: Node) -> int | None:
    """By how many elements the result of a view begins behind its operand; None where that is not known."""
    if node.op in _TURNS:
        return 0
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
