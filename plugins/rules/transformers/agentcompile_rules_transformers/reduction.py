"""Reductions along neighbouring axes of any tensor, alone and with the pointwise operators before them."""

from collections.abc import Iterable, Iterator

from attrs import frozen

from agentcompile_core.plugin_api import (
    KERNEL_TYPES,
    REDUCTION,
    Argument,
    DType,
    Graph,
    Match,
    Node,
    Operand,
    Prologue,
    RegionRule,
    RegionView,
    SemanticLabel,
    Target,
    argument,
    has_one_rounding,
    is_contiguous,
    prologues,
    ref,
)

from . import kinds

MOST_INPUTS = 3
SUMS = {f"aten.{name}.{overload}": name for name in ("sum", "mean") for overload in ("default", "dim_IntList", "dim")}
EXTREMES = {"aten.amax.default": "amax", "aten.max.default": "amax", "aten.amin.default": "amin", "aten.min.default": "amin"}
PLACES = {"aten.max.dim": "max", "aten.min.dim": "min", "aten.argmax.default": "max", "aten.argmin.default": "min"}
SPREADS = {f"aten.{name}.{overload}": name for name in ("var", "std") for overload in ("correction", "dim", "default")}
PRODUCTS = {"aten.prod.default": "prod", "aten.prod.dim_int": "prod"}
EXPONENTIALS = {"aten.logsumexp.default": "logsumexp"}
NORMS = {1: "l1", 2: "l2"}
NORM = "aten.linalg_vector_norm.default"
OF_ALL = {f"aten.{name}.default" for name in ("sum", "mean", "max", "min", "prod", "var", "std")}  # these have no axes
OPERATIONS = {**SUMS, **EXTREMES, **PLACES, **SPREADS, **PRODUCTS, **EXPONENTIALS}


@frozen(kw_only=True)
class Reduction:
    """A reducing node: what it does to ``x`` [outer, columns, inner] along the middle axis."""

    node: Node
    op: str
    x: str
    outer: int
    columns: int
    inner: int
    correction: float = 0.0


class ReductionRule(RegionRule):
    """``reduction`` matches: every reduction of contiguous floats along neighbouring axes, and what may be taken in before it."""

    name = "reduction"
    version = 1
    kinds = (kinds.REDUCTION,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Each alone, then with growing prologues. Places of extremes are found among stored values only."""
        view = RegionView(graph=graph)
        return [match for node in graph.nodes for match in _matches(view, node)]


def reduction_of(view: RegionView, node: Node) -> Reduction | None:
    """The reduction of a node; None where it is none, or none that one pass along neighbouring axes can make."""
    op = OPERATIONS.get(node.op) or (NORMS.get(_number(argument(node, "ord"))) if node.op == NORM else None)
    x = ref(argument(node, "self")) if op else None
    if op is None or x is None:
        return None
    spec = view.graph.spec(x)
    along = _along(spec.shape, None if node.op in OF_ALL else argument(node, "dim"))
    correction = _correction(node) if node.op in SPREADS else 0.0
    if along is None or not spec.numel or not _types_fit(view, node, spec.dtype) or not is_contiguous(spec) or correction is None:
        return None
    outer, columns, inner = along
    if columns <= correction:
        return None
    return Reduction(node=node, op=op, x=x, outer=outer, columns=columns, inner=inner, correction=correction)


def reduced_along(view: RegionView, node: Node, op: str, axis: Argument) -> Reduction | None:
    """What ``op`` does along one ``axis`` of the first operand of a node whose result is as large; None: no kernel reads it so."""
    x = ref(argument(node, "self"))
    if x is None:
        return None
    spec = view.graph.spec(x)
    along = _along(spec.shape, axis) if isinstance(axis, int) else None
    if along is None or not spec.numel or not _types_fit(view, node, spec.dtype) or not is_contiguous(spec):
        return None
    outer, columns, inner = along
    return Reduction(node=node, op=op, x=x, outer=outer, columns=columns, inner=inner)


def _number(given: Argument) -> int:
    return int(given) if isinstance(given, int | float) and given in NORMS else 0


def _types_fit(view: RegionView, node: Node, given: DType) -> bool:
    """Floats that are not made shorter on the way in; indices are int64."""
    results = [view.graph.spec(out).dtype for out in node.outputs]
    floats = [dtype for dtype in results if dtype is not DType.I64]
    return given in KERNEL_TYPES and all(dtype in KERNEL_TYPES and dtype.bytes >= given.bytes for dtype in floats)


def _along(shape: tuple[int, ...], dim: Argument) -> tuple[int, int, int] | None:
    """(outer, columns, inner) of a reduction over ``dim`` (an axis, several or none: all); None where axes are no neighbours."""
    rank = len(shape)
    given = range(rank) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    chosen = list(given) if isinstance(given, range | tuple) else [None]
    if not all(isinstance(axis, int) for axis in chosen):
        return None
    axes = sorted({int(axis) % max(1, rank) for axis in chosen})  # type: ignore[arg-type]
    axes = [axis for axis in axes if axis < rank and shape[axis] != 1]
    if not axes:
        return None  # a copy; not worth a kernel of its own
    first, last = axes[0], axes[-1]
    if any(shape[axis] != 1 and axis not in axes for axis in range(first, last + 1)):
        return None
    return _product(shape[:first]), _product(shape[first : last + 1]), _product(shape[last + 1 :])


def _product(extents: tuple[int, ...]) -> int:
    found = 1
    for extent in extents:
        found *= extent
    return found


def _correction(node: Node) -> float | None:
    """What is subtracted from the count of a variance."""
    if not node.op.endswith(".correction"):
        return 1.0 if argument(node, "unbiased") else 0.0
    found = argument(node, "correction")
    return 1.0 if found is None else float(found) if isinstance(found, int | float) else None


def _matches(view: RegionView, node: Node) -> Iterator[Match]:
    found = reduction_of(view, node)
    if found is None:
        return
    for prologue in prologues(view, found.x, frozenset({node.name}), limit=MOST_INPUTS):
        nodes = (*prologue.nodes, node.name)
        if has_one_rounding(view, nodes, node.outputs[0]):
            yield _match(view, found, prologue, nodes)
        if node.op in PLACES:
            return


def _match(view: RegionView, found: Reduction, prologue: Prologue, nodes: tuple[str, ...]) -> Match:
    label = SemanticLabel.REDUCTION_POINTWISE if prologue.nodes else SemanticLabel.REDUCTION
    reads = tuple(view.read(f"in{j}", value) for j, value in enumerate(prologue.inputs))
    return Match(
        kind=REDUCTION, label=label, nodes=view.deps.members(view.deps.mask(nodes)), operands=(*reads, *_written(view, found.node)),
        attributes=(("outer", found.outer), ("columns", found.columns), ("inner", found.inner), ("op", found.op),
                    ("correction", found.correction)),
        epilogue=prologue.expression)


def _written(view: RegionView, node: Node) -> Iterator[Operand]:
    for out in node.outputs:
        yield view.write("indices" if view.graph.spec(out).dtype is DType.I64 else "out", out)
