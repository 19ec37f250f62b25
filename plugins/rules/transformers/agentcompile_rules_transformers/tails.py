"""What is computed of a result element by element, behind it."""

from collections.abc import Callable, Iterator, Mapping

from agentcompile_core.plugin_api import (
    Expression,
    Growth,
    Node,
    Operation,
    RegionView,
    cone,
    grow,
    has_one_rounding,
    is_contiguous,
)

MOST_AUX = 2
Tail = tuple[tuple[str, ...], str, tuple[str, ...], Expression | None]


def tails(view: RegionView, node: Node) -> Iterator[Tail]:
    """Growing runs of nodes behind the norm ``node``, in its type: their names, their result, the other operands, and the expression."""
    made = view.graph.spec(node.outputs[0])

    def fits(value: str) -> bool:
        spec = view.graph.spec(value)
        return spec.numel == made.numel and spec.dtype is made.dtype and is_contiguous(spec)

    for growth in runs_behind(view, node.outputs[0], frozenset({node.name}), fits):
        if growth.expression.operations and fits(growth.output) and has_one_rounding(view, growth.nodes, growth.output):
            yield growth.nodes, growth.output, growth.external, growth.expression


def runs_behind(view: RegionView, made: str, inside: frozenset[str], fits: Callable[[str], bool]) -> Iterator[Growth]:
    """Growing runs of pointwise nodes behind ``made``, which they call acc0, each also with the nodes that make its other operands.

    ``inside`` makes ``made``; at most two others are read, aux0 and aux1, which ``fits`` accepts.
    """
    numel = view.graph.spec(made).numel
    plain = {growth.nodes: growth for growth in grow(view, {made: "acc0"}, inside, prefix="aux", limit=MOST_AUX, fits=fits)}
    yield from plain.values()
    ends = dict.fromkeys(growth.output for growth in grow(view, {made: "acc0"}, inside, prefix="aux", limit=MOST_AUX,
                                                          fits=lambda value: view.graph.spec(value).numel == numel))
    for end in ends:
        last = view.producer(end)
        whole = cone(view, last, limit=1 + MOST_AUX, fits=lambda value: value == made or fits(value)) if last is not None else None
        if whole is None or made not in whole.external or inside & set(whole.nodes) or whole.nodes in plain:
            continue
        others = tuple(value for value in whole.external if value != made)
        names = {f"in{i}": "acc0" if value == made else f"aux{others.index(value)}" for i, value in enumerate(whole.external)}
        if len(others) <= MOST_AUX and view.only_used_by(made, set(whole.nodes)):
            yield Growth(nodes=whole.nodes, output=whole.output, expression=_renamed(whole.expression, names), external=others)


def _renamed(expression: Expression, names: Mapping[str, str]) -> Expression:
    operations = tuple(Operation(op.kind, tuple(names.get(o, o) if isinstance(o, str) else o for o in op.operands))
                       for op in expression.operations)
    return Expression(arguments=tuple(sorted(names.values())), operations=operations)
