"""Projections that are one matrix from the start: a linear node whose result is only read in parts."""

import math
from collections.abc import Sequence

from agentcompile_core.plugin_api import Node, RegionView, argument, is_contiguous, operator_names

Part = tuple[int, str]  # first element, value
VECTOR_BYTES = 16  # what kernels read at once, and whose multiples the addresses of whole vectors are


def lie_well(view: RegionView, values: Sequence[str]) -> bool:
    """Whether none of ``values``, which lie side by side in this order, is whole vectors behind others that are not."""
    begin = 0
    for value in values:
        nbytes = view.graph.spec(value).nbytes
        if begin % VECTOR_BYTES and nbytes % VECTOR_BYTES == 0:
            return False
        begin += nbytes
    return True


def parts_of(view: RegionView, value: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The parts that ``value`` [.., n] is read in, in order, and the nodes that cut it.

    None unless every reader takes ranges of the last axis, the ranges lie side by side from 0 to n, and there are at
    least two: then a kernel may write the parts instead of the whole.
    """
    shape = view.graph.spec(value).shape
    if view.leaves(value) or not shape or view.graph.spec(value).numel != shape[-1]:
        return None
    parts: list[Part] = []
    cuts: list[str] = []
    for node in view.users(value):
        found = _ranges(view, node, len(shape), shape[-1])
        if found is not None:
            cuts.append(node.name)
        elif (behind := _behind_views(view, node)) is not None:
            found, nodes = behind
            cuts += nodes
        else:
            return None
        parts += found
    parts.sort()
    end = 0
    for first, name in parts:
        if first != end or not is_contiguous(view.graph.spec(name)):
            return None
        end += view.graph.spec(name).numel
    values = tuple(name for _, name in parts)
    return (values, tuple(cuts)) if end == shape[-1] and len(parts) > 1 and lie_well(view, values) else None


def _behind_views(view: RegionView, node: Node) -> tuple[list[Part], list[str]] | None:
    """The parts that a free view of the value is read in, and the nodes: [1, 1, heads, d] cut into heads is cut into heads * d elements."""
    if not view.is_free(node) or view.leaves(node.outputs[0]) or not view.users(node.outputs[0]):
        return None
    shape = view.graph.spec(node.outputs[0]).shape
    parts: list[Part] = []
    for user in view.users(node.outputs[0]):
        axis = argument(user, "dim") if user.op == "aten.slice.Tensor" or user.op in operator_names.SPLITS else None
        if not isinstance(axis, int) or any(extent != 1 for extent in shape[: axis % len(shape)]):
            return None
        found = _ranges(view, user, len(shape), shape[axis], axis % len(shape))
        if found is None:
            return None
        inner = math.prod(shape[axis % len(shape) + 1 :])
        parts += [(first * inner, name) for first, name in found]
    return parts, [node.name, *(user.name for user in view.users(node.outputs[0]))]


def _ranges(view: RegionView, node: Node, rank: int, n: int, along: int = -1) -> list[Part] | None:
    if node.op == "aten.slice.Tensor":
        axis, first, step = (argument(node, name) for name in ("dim", "start", "step"))
        first = 0 if first is None else first
        if not isinstance(axis, int) or axis % rank != along % rank or not isinstance(first, int) or step != 1:
            return None
        return [(first + n if first < 0 else first, node.outputs[0])]
    if node.op in operator_names.SPLITS:
        axis = argument(node, "dim")
        if not isinstance(axis, int) or axis % rank != along % rank:
            return None
        found, first = [], 0
        for out in node.outputs:
            found.append((first, out))
            first += view.graph.spec(out).shape[along]
        return found
    return None
