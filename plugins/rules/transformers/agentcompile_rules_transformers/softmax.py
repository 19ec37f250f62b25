"""Softmax and log-softmax along any axis, alone and with what scales, masks or casts the scores before it."""

from collections.abc import Iterable, Iterator

from agentcompile_core.plugin_api import (
    KERNEL_TYPES,
    SOFTMAX,
    Graph,
    Match,
    Node,
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
    translate,
)

from . import kinds

LOG = {"aten.softmax.int": False, "aten._softmax.default": False, "aten.log_softmax.int": True, "aten._log_softmax.default": True}
MOST_INPUTS = 3


class SoftmaxRule(RegionRule):
    """``softmax`` matches: every softmax of contiguous scores, and every way to take in what comes before it."""

    name = "softmax"
    version = 1
    kinds = (kinds.SOFTMAX,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Each alone, then with growing prologues; where only a cast to a shorter type reads the result, both with and without it."""
        view = RegionView(graph=graph)
        return [match for node in graph.nodes if node.op in LOG for match in _matches(view, node)]


def _matches(view: RegionView, node: Node) -> Iterator[Match]:
    x, dim = ref(argument(node, "self")), argument(node, "dim")
    if x is None or not isinstance(dim, int):
        return
    spec, result = view.graph.spec(x), view.graph.spec(node.outputs[0])
    plain = all(s.dtype in KERNEL_TYPES and is_contiguous(s) for s in (spec, result))
    if not plain or not spec.numel or result.dtype.bytes < spec.dtype.bytes:
        return
    for ends in ((node,), *_casts(view, node)):
        for prologue in prologues(view, x, frozenset({node.name}), limit=MOST_INPUTS):
            nodes = (*prologue.nodes, *(end.name for end in ends))
            if has_one_rounding(view, nodes, ends[-1].outputs[0]):
                yield _match(view, nodes, prologue, ends[-1].outputs[0], dim)


def _casts(view: RegionView, node: Node) -> Iterator[tuple[Node, Node]]:
    """The cast behind a softmax that is computed in float32 and stored in a shorter type."""
    out = node.outputs[0]
    users = view.users(out)
    if len(users) != 1 or view.leaves(out) or users[0].kind != "cast" or not translate(view, users[0]):
        return
    spec = view.graph.spec(users[0].outputs[0])
    if spec.dtype in KERNEL_TYPES and is_contiguous(spec):
        yield node, users[0]


def _match(view: RegionView, nodes: tuple[str, ...], prologue: Prologue, out: str, dim: int) -> Match:
    shape = view.graph.spec(out).shape or (1,)
    axis = dim % len(shape)
    softmax = next(view.graph.node_by_name[name] for name in nodes if view.graph.node_by_name[name].op in LOG)
    outer, inner = 1, 1
    for extent in shape[:axis]:
        outer *= extent
    for extent in shape[axis + 1:]:
        inner *= extent
    operands = (*(view.read(f"in{j}", value) for j, value in enumerate(prologue.inputs)), view.write("out", out))
    return Match(kind=SOFTMAX, label=SemanticLabel.SOFTMAX, nodes=view.deps.members(view.deps.mask(nodes)), operands=operands,
                 attributes=(("outer", outer), ("columns", shape[axis]), ("inner", inner), ("log", LOG[softmax.op])),
                 epilogue=prologue.expression)
