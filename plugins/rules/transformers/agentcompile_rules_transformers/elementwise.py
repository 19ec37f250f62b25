"""Pointwise nodes and chains of them that no other match takes in."""

import math
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
from .channel_norm import batch_norm_of
from .parts import parts

MOST_INPUTS = 6
BY_AXIS = frozenset(("channel", "middle"))  # how an input is read for which the axes count, and not only the sizes


class ElementwiseRule(RegionRule):
    """``elementwise`` matches: each pointwise node, and each chain from it on that ends in one value."""

    name = "elementwise"
    version = 6
    kinds = (kinds.ELEMENTWISE,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Single nodes, then growing chains."""
        view = RegionView(graph=graph)
        found: list[Match] = []
        for node in graph.nodes:
            if is_pointwise(view, node):
                found += _chains(view, node, tuple(node.inputs), express(view, node, {v: f"in{i}" for i, v in enumerate(node.inputs)}))
            elif (batch_norm := batch_norm_of(view, node)) is not None:
                found += _chains(view, node, *batch_norm)
        seen = {match.nodes for match in found}
        return [*found, *(match for match in _cones(view) if match.nodes not in seen), *parts(view)]


def _cones(view: RegionView) -> Iterator[Match]:
    """Everything that one result is computed from by pointwise nodes alone."""
    for node in view.graph.nodes:
        result = view.graph.spec(node.outputs[0]) if node.outputs else None
        found = cone(view, node, limit=MOST_INPUTS, fits=lambda value, result=result: bool(lies(view.graph.spec(value), result)[0]))
        if found is not None and found.expression.operations:
            yield from _matches(view, found.nodes, found.external, found.output, found.expression)


def _chains(view: RegionView, node: Node, inputs: tuple[str, ...], first: Expression) -> Iterator[Match]:
    shape = view.graph.spec(node.outputs[0])
    if len(inputs) > MOST_INPUTS:
        return
    if not first.operations:
        if node.kind == "cast":  # to a wider type: nothing is computed, and it is a launch like any other
            yield from _matches(view, (node.name,), inputs, node.outputs[0], None)
        return
    yield from _matches(view, (node.name,), inputs, node.outputs[0], first)
    for growth in grow(view, {node.outputs[0]: "acc0"}, frozenset({node.name}), prefix="in", first=len(inputs),
                       limit=MOST_INPUTS - len(inputs), fits=lambda value: bool(lies(view.graph.spec(value), shape)[0])):
        nodes, read = (node.name, *growth.nodes), (*inputs, *growth.external)
        if has_one_rounding(view, nodes, growth.output):
            yield from _matches(view, nodes, read, growth.output, composed(first, growth.expression))


def composed(first: Expression, tail: Expression) -> Expression:
    """``tail`` with the result of ``first`` as its acc0."""
    count = len(first.operations)
    moved = tuple(
        type(op)(op.kind, tuple(count - 1 if o == "acc0" else o + count if type(o) is int else o for o in op.operands))
        for op in tail.operations
    )
    rest = tuple(a for a in tail.arguments if a != "acc0")
    return Expression(arguments=(*first.arguments, *rest), operations=(*first.operations, *moved))


def lies(spec: TensorSpec, result: TensorSpec) -> tuple[str, int]:
    """How an input is read for a result of that shape: full, row, scalar, channel or middle; and how many neighbours share an element of
    a channel, or lie behind the axes along which a middle input repeats.

    Empty if it is none of these. A channel input has its elements along neighbouring axes and repeats along all others; a middle
    input repeats along neighbouring axes and has elements along all others.
    """
    if not is_contiguous(spec):
        return "", 1
    if spec.numel == result.numel:
        return "full", 1
    if spec.numel == 1:
        return "scalar", 1
    if spec.shape[-1:] == result.shape[-1:] == (spec.numel,):
        return "row", 1
    shape = (1,) * (len(result.shape) - len(spec.shape)) + spec.shape
    axes = [axis for axis, extent in enumerate(shape) if extent != 1]
    if len(shape) != len(result.shape):
        return "", 1
    repeated = [axis for axis, extent in enumerate(shape) if extent != result.shape[axis]]
    if axes[0] < repeated[0] and axes[-1] > repeated[-1] and math.prod(shape[repeated[0]: repeated[-1] + 1]) == 1 and result.numel:
        return "middle", math.prod(result.shape[repeated[-1] + 1:])
    if shape[axes[0]: axes[-1] + 1] != result.shape[axes[0]: axes[-1] + 1]:
        return "", 1
    return "channel", math.prod(result.shape[axes[-1] + 1:])


def _read(view: RegionView, nodes: tuple[str, ...], value: str, result: TensorSpec) -> tuple[str, int]:
    """How all of ``nodes`` that read an input do, and the result (a view on the way may change what a row is); empty where they differ."""
    spec, found = view.graph.spec(value), set()
    if spec.numel == 1 < result.numel:  # also where a number is made of it first, which each element may make for itself
        return "scalar", 1
    for node in (view.graph.node_by_name[name] for name in nodes):
        if value not in node.inputs:
            continue
        made = view.graph.spec(node.outputs[0])
        by_channel = batch_norm_of(view, node) is not None and value != node.inputs[0]
        if made.numel != result.numel:  # each element makes for itself what is repeated
            found.add(_read(view, nodes, node.outputs[0], result) if lies(spec, made)[0] == "full" else ("", 1))
        else:
            found.add(("channel", math.prod(made.shape[2:])) if by_channel else lies(spec, made))
    kinds_found = {*found, *(() if BY_AXIS & {kind for kind, _ in found} else (lies(spec, result),))}
    return kinds_found.pop() if len(kinds_found) == 1 else ("", 1)


def _matches(view: RegionView, nodes: tuple[str, ...], inputs: tuple[str, ...], out: str,
             expression: Expression | None) -> Iterator[Match]:
    """The match, if every input can be read and all that are read by an axis have as many neighbours there."""
    result = view.graph.spec(out)
    read = [_read(view, nodes, value, result) for value in inputs]
    inner = {neighbours for kind, neighbours in read if kind in BY_AXIS}
    if len(inner) > 1 or not all(kind for kind, _ in read):
        return
    attributes: list[tuple[str, Scalar]] = [("count", result.numel), ("columns", result.shape[-1] if result.shape else 1)]
    attributes += [(f"broadcast{i}", kind) for i, (kind, _) in enumerate(read)]
    attributes += [("inner", each) for each in inner]
    operands = [view.read(f"in{i}", value) for i, value in enumerate(inputs)]
    yield Match(kind=ELEMENTWISE, label=SemanticLabel.ELEMENTWISE, nodes=view.deps.members(view.deps.mask(nodes)),
                operands=(*operands, view.write("out", out)), attributes=tuple(attributes), epilogue=expression)
