"""Pools of windows of one size, of images, signals and volumes, alone and with the pointwise operators before them."""

import math
from collections.abc import Iterable, Iterator

from agentcompile_core.plugin_api import (
    KERNEL_TYPES,
    POOL,
    Graph,
    Match,
    Node,
    Prologue,
    RegionRule,
    RegionView,
    Scalar,
    Target,
    argument,
    has_one_rounding,
    is_contiguous,
    prologues,
    ref,
)

from . import pool_kind
from .pool_kind import AXES

MOST_INPUTS = 3
POOLS = {f"aten.{name}_pool{axes}d.default": (op, axes) for name, op in (("max", "max"), ("avg", "mean")) for axes in (1, 2, 3)}
_NEUTRAL = {"window": 1, "step": 1, "pad": 0, "apart": 1}
_NAMES = {"window": "kernel_size", "step": "stride", "pad": "padding", "apart": "dilation"}


class PoolRule(RegionRule):
    """``pool`` matches: pools of contiguous floats whose windows begin inside; indices of maxima are not among their results."""

    name = "pool"
    version = 1
    kinds = (pool_kind.POOLS,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Each alone, then with growing prologues."""
        view = RegionView(graph=graph)
        return [match for node in graph.nodes if node.op in POOLS for match in _matches(view, node)]


def _matches(view: RegionView, node: Node) -> Iterator[Match]:
    x, out = ref(argument(node, "self")), node.outputs[0]
    if x is None or len(node.outputs) != 1:
        return
    given, made = view.graph.spec(x), view.graph.spec(out)
    attributes = _attributes(node, given.shape, made.shape)
    fits = given.dtype in KERNEL_TYPES and made.dtype is given.dtype and is_contiguous(given) and is_contiguous(made)
    if attributes is None or not fits or not made.numel:
        return
    for prologue in prologues(view, x, frozenset({node.name}), limit=MOST_INPUTS):
        nodes = (*prologue.nodes, node.name)
        if has_one_rounding(view, nodes, out):
            yield _match(view, prologue, nodes, out, attributes)


def _match(view: RegionView, prologue: Prologue, nodes: tuple[str, ...], out: str, attributes: dict[str, Scalar]) -> Match:
    reads = tuple(view.read(f"in{j}", value) for j, value in enumerate(prologue.inputs))
    return Match(kind=POOL, label=POOL, nodes=view.deps.members(view.deps.mask(nodes)), operands=(*reads, view.write("out", out)),
                 attributes=tuple(attributes.items()), epilogue=prologue.expression)


def _attributes(node: Node, given: tuple[int, ...], made: tuple[int, ...]) -> dict[str, Scalar] | None:
    """Windows along three axes, the first ones of one element where there are fewer; None where a window is cut off at the end."""
    op, axes = POOLS[node.op]
    found: dict[str, Scalar] = {"outer": math.prod(given[: len(given) - axes]), "op": op}
    sizes = {word: _per_axis(node, word, axes) for word in _NAMES}
    if any(each is None for each in sizes.values()) or len(given) < axes:
        return None
    for axis in range(AXES):
        own = axis - (AXES - axes)
        each = {word: (values or ())[own] if own >= 0 else _NEUTRAL[word] for word, values in sizes.items()}
        extent, results = (given[own - axes], made[own - axes]) if own >= 0 else (1, 1)
        reach = extent + 2 * each["pad"] - each["apart"] * (each["window"] - 1) - 1
        if results != reach // each["step"] + 1:
            return None
        found |= {f"{word}{axis}": value for word, value in (("extent", extent), ("made", results), *each.items())}
    if op == "mean":
        window = math.prod(int(found[f"window{axis}"]) for axis in range(AXES))
        override = argument(node, "divisor_override") if axes > 1 else None
        found["divisor"] = override if isinstance(override, int) else window if argument(node, "count_include_pad") else 0
    return found


def _per_axis(node: Node, word: str, axes: int) -> tuple[int, ...] | None:
    """An argument for each axis; of means nothing is apart, and without a stride windows lie side by side."""
    if word == "apart" and POOLS[node.op][0] == "mean":
        return (1,) * axes
    given = argument(node, _NAMES[word])
    if word == "step" and given in (None, ()):
        given = argument(node, _NAMES["window"])
    values = tuple(v for v in ((given,) if isinstance(given, int) else given if isinstance(given, tuple) else ()) if isinstance(v, int))
    values = values * axes if len(values) == 1 else values
    return values if len(values) == axes else None
