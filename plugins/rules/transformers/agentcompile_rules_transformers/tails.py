"""What is computed of a norm element by element, in its type."""

from collections.abc import Iterator

from agentcompile_core.plugin_api import Expression, Node, RegionView, grow, has_one_rounding, is_contiguous

MOST_AUX = 2
Tail = tuple[tuple[str, ...], str, tuple[str, ...], Expression | None]


def tails(view: RegionView, node: Node) -> Iterator[Tail]:
    """Growing runs of nodes behind the norm ``node``: their names, their result, the other operands, and the expression over acc0."""
    made = view.graph.spec(node.outputs[0])

    def fits(value: str) -> bool:
        spec = view.graph.spec(value)
        return spec.numel == made.numel and spec.dtype is made.dtype and is_contiguous(spec)

    for growth in grow(view, {node.outputs[0]: "acc0"}, frozenset({node.name}), prefix="aux", limit=MOST_AUX, fits=fits):
        if growth.expression.operations and fits(growth.output) and has_one_rounding(view, growth.nodes, growth.output):
            yield growth.nodes, growth.output, growth.external, growth.expression
