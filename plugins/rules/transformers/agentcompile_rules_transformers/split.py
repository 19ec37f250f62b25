"""Projections that are one matrix from the start: a linear node whose result is only read in parts."""

from agentcompile_core.plugin_api import Node, RegionView, argument, is_contiguous

SPLITS = ("aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default", "aten.chunk.default")

Part = tuple[int, str]  # first element, value


def parts_of(view: RegionView, value: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The parts that ``value`` [.., n] is read in, in order, and the nodes that cut it.

    None unless every reader takes ranges of the last axis, the ranges lie side by side from 0 to n, and there are at
    least two: then a kernel may write the parts instead of the whole.
    """
    shape = view.graph.spec(value).shape
    if view.leaves(value) or not shape or view.graph.spec(value).numel != shape[-1]:
        return None
    parts: list[Part] = []
    for node in view.users(value):
        found = _ranges(view, node, len(shape), shape[-1])
        if found is None:
            return None
        parts += found
    parts.sort()
    end = 0
    for first, name in parts:
        if first != end or not is_contiguous(view.graph.spec(name)):
            return None
        end += view.graph.spec(name).numel
    if end != shape[-1] or len(parts) < 2:
        return None
    return tuple(name for _, name in parts), tuple(node.name for node in view.users(value))


def _ranges(view: RegionView, node: Node, rank: int, n: int) -> list[Part] | None:
    if node.op == "aten.slice.Tensor":
        axis, first, step = (argument(node, name) for name in ("dim", "start", "step"))
        first = 0 if first is None else first
        if not isinstance(axis, int) or axis % rank != rank - 1 or not isinstance(first, int) or step != 1:
            return None
        return [(first + n if first < 0 else first, node.outputs[0])]
    if node.op in SPLITS:
        axis = argument(node, "dim")
        if not isinstance(axis, int) or axis % rank != rank - 1:
            return None
        found, first = [], 0
        for out in node.outputs:
            found.append((first, out))
            first += view.graph.spec(out).shape[-1]
        return found
    return None
