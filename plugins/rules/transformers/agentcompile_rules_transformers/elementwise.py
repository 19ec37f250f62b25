"""Pointwise nodes and chains of them that no other match takes in."""

from collections.abc import Iterable, Iterator

from agentcompile_core.plugin_api import (
    ELEMENTWISE,
    Expression,
    Graph,
    Match,
    Node,
    RegionRule,
    RegionView,
    Scalar,
    SemanticLabel,
    Target,
    TensorSpec,
    cone,
    express,
    grow,
    has_one_rounding,
    is_contiguous,
    is_pointwise,
)

from . import kinds
from .parts import parts

MOST_INPUTS = 6


class ElementwiseRule(RegionRule):
    """``elementwise`` matches: each pointwise node, and each chain from it on that ends in one value."""

    name = "elementwise"
    version = 2
    kinds = (kinds.ELEMENTWISE,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Single nodes, then growing chains."""
        view = RegionView(graph=graph)
        found: list[Match] = []
        for node in graph.nodes:
            if is_pointwise(view, node):
                found += _chains(view, node)
        seen = {match.nodes for match in found}
        return [*found, *(match for match in _cones(view) if match.nodes not in seen), *parts(view)]


def _cones(view: RegionView) -> Iterator[Match]:
    """Everything that one result is computed from by pointwise nodes alone."""
    for node in view.graph.nodes:
        result = view.graph.spec(node.outputs[0]) if node.outputs else None
        found = cone(view, node, limit=MOST_INPUTS, fits=lambda value, result=result: bool(_broadcast(view.graph.spec(value), result)))
        if found is not None and found.expression.operations:
            yield _match(view, found.nodes, found.external, found.output, found.expression)


def _chains(view: RegionView, node: Node) -> Iterator[Match]:
    inputs = tuple(node.inputs)
    shape = view.graph.spec(node.outputs[0])
    if len(inputs) > MOST_INPUTS or not all(_broadcast(view.graph.spec(value), shape) for value in inputs):
        return
    names = {value: f"in{i}" for i, value in enumerate(inputs)}
    first = express(view, node, names)
    if not first.operations:
        return  # a cast alone only moves bytes
    yield _match(view, (node.name,), inputs, node.outputs[0], first)
    for growth in grow(view, {node.outputs[0]: "acc0"}, frozenset({node.name}), prefix="in", first=len(inputs),
                       limit=MOST_INPUTS - len(inputs), fits=lambda value: bool(_broadcast(view.graph.spec(value), shape))):
        nodes, read = (node.name, *growth.nodes), (*inputs, *growth.external)
        result = view.graph.spec(growth.output)  # a view on the way may have changed what a row is
        if has_one_rounding(view, nodes, growth.output) and all(_broadcast(view.graph.spec(value), result) for value in read):
            yield _match(view, nodes, read, growth.output, composed(first, growth.expression))


def composed(first: Expression, tail: Expression) -> Expression:
    """``tail`` with the result of ``first`` as its acc0."""
    count = len(first.operations)
    moved = tuple(
        type(op)(op.kind, tuple(count - 1 if o == "acc0" else o + count if type(o) is int else o for o in op.operands))
        for op in tail.operations
    )
    rest = tuple(a for a in tail.arguments if a != "acc0")
    return Expression(arguments=(*first.arguments, *rest), operations=(*first.operations, *moved))


def _broadcast(spec: TensorSpec, result: TensorSpec) -> str:
    """How an input is read for a result of that shape: full, row, scalar; empty if it is not one of these."""
    if not is_contiguous(spec):
        return ""
    if spec.numel == result.numel:
        return "full"
    if spec.numel == 1:
        return "scalar"
    return "row" if spec.shape[-1:] == result.shape[-1:] == (spec.numel,) else ""


def _match(view: RegionView, nodes: tuple[str, ...], inputs: tuple[str, ...], out: str, expression: Expression) -> Match:
    result = view.graph.spec(out)
    attributes: list[tuple[str, Scalar]] = [("count", result.numel), ("columns", result.shape[-1] if result.shape else 1)]
    attributes += [(f"broadcast{i}", _broadcast(view.graph.spec(value), result)) for i, value in enumerate(inputs)]
    operands = [view.read(f"in{i}", value) for i, value in enumerate(inputs)]
    return Match(kind=ELEMENTWISE, label=SemanticLabel.ELEMENTWISE, nodes=view.deps.members(view.deps.mask(nodes)),
                 operands=(*operands, view.write("out", out)), attributes=tuple(attributes), epilogue=expression)
