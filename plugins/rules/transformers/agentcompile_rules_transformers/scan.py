"""Running sums and products along any axis, from either end, alone and with the pointwise operators before them."""

from collections.abc import Iterable, Iterator

from agentcompile_core.plugin_api import (
    SCAN,
    Graph,
    Match,
    Node,
    Prologue,
    RegionRule,
    RegionView,
    Target,
    argument,
    has_one_rounding,
    prologues,
)

from . import scan_kind
from .reduction import MOST_INPUTS, Reduction, reduced_along

SCANS = {"aten.cumsum.default": "sum", "aten.cumprod.default": "prod"}
FLIP = "aten.flip.default"


class ScanRule(RegionRule):
    """``scan`` matches: every cumsum and cumprod of contiguous floats; where only they are between two flips, from the other end."""

    name = "scan"
    version = 1
    kinds = (scan_kind.SCANS,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Each alone, then with growing prologues; the same with the flips around it."""
        view = RegionView(graph=graph)
        return [match for node in graph.nodes if node.op in SCANS for match in _matches(view, node)]


def _matches(view: RegionView, node: Node) -> Iterator[Match]:
    found = reduced_along(view, node, SCANS[node.op], argument(node, "dim"))
    if found is None:
        return
    yield from _grown(view, found, (node,), (node.name,))
    flips = _flips(view, node)
    if flips is not None:
        before, after = flips
        whole = reduced_along(view, before, SCANS[node.op], argument(node, "dim"))
        if whole is not None:
            yield from _grown(view, whole, (before, after), (before.name, node.name, after.name))


def _flips(view: RegionView, node: Node) -> tuple[Node, Node] | None:
    """The flips of the axis before and behind a scan, if nothing else reads what is between."""
    before, users = view.producer(node.inputs[0]), view.users(node.outputs[0])
    if before is None or len(users) != 1 or before.op != FLIP or users[0].op != FLIP:
        return None
    rank, axis = len(view.graph.spec(node.outputs[0]).shape), argument(node, "dim")
    turned = [_axis(argument(flip, "dims"), rank) for flip in (before, users[0])]
    own = view.only_used_by(before.outputs[0], {node.name}) and view.only_used_by(node.outputs[0], {users[0].name})
    return (before, users[0]) if own and isinstance(axis, int) and turned == [axis % rank] * 2 else None


def _axis(dims: object, rank: int) -> int | None:
    one = isinstance(dims, tuple) and len(dims) == 1 and isinstance(dims[0], int)
    return dims[0] % rank if one else None  # type: ignore[index, no-any-return]


def _grown(view: RegionView, found: Reduction, ends: tuple[Node, ...], inner: tuple[str, ...]) -> Iterator[Match]:
    out = ends[-1].outputs[0]
    for prologue in prologues(view, found.x, frozenset({ends[0].name}), limit=MOST_INPUTS):
        nodes = (*prologue.nodes, *inner)
        if has_one_rounding(view, nodes, out):
            yield _match(view, found, prologue, nodes, out)


def _match(view: RegionView, found: Reduction, prologue: Prologue, nodes: tuple[str, ...], out: str) -> Match:
    reads = tuple(view.read(f"in{j}", value) for j, value in enumerate(prologue.inputs))
    return Match(
        kind=SCAN, label=SCAN, nodes=view.deps.members(view.deps.mask(nodes)), operands=(*reads, view.write("out", out)),
        attributes=(("outer", found.outer), ("columns", found.columns), ("inner", found.inner), ("op", found.op),
                    ("reverse", any(view.graph.node_by_name[name].op == FLIP for name in nodes))),
        epilogue=prologue.expression)
