"""Embedding lookup at the start of a step, the choice of the next token at its end."""

from collections.abc import Iterable

from agentcompile_core.plugin_api import (
    ARGMAX,
    GATHER,
    KERNEL_TYPES,
    DType,
    Graph,
    Match,
    Node,
    Operand,
    Ref,
    RegionRule,
    RegionView,
    SemanticLabel,
    Target,
    argument,
    is_contiguous,
    operator_names,
    ref,
)

from . import kinds

EMBEDDING = "aten.embedding.default"


class GatherRule(RegionRule):
    """``gather`` matches: embedding lookups."""

    name = "gather"
    version = 1
    kinds = (kinds.GATHER,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Every embedding with 64-bit ids."""
        view = RegionView(graph=graph)
        return [match for match in (_gather(view, node) for node in graph.nodes if node.op == EMBEDDING) if match]


def _gather(view: RegionView, node: Node) -> Match | None:
    table, ids = ref(argument(node, "weight")), ref(argument(node, "indices"))  # the other arguments concern gradients
    if table is None or ids is None or not view.is_weight(Ref(table)):
        return None
    spec, wanted = view.graph.spec(table), view.graph.spec(ids)
    if len(spec.shape) != 2 or spec.dtype not in KERNEL_TYPES or wanted.dtype is not DType.I64 or not is_contiguous(wanted):
        return None
    return Match(
        kind=GATHER, label=SemanticLabel.GATHER, nodes=(node.name,),
        operands=(view.read("ids", ids), view.read("table", table), view.write("out", node.outputs[0])),
        attributes=(("rows", wanted.numel), ("columns", spec.shape[1]),
                    ("unread_bytes", max(0, spec.shape[0] - wanted.numel) * spec.shape[1] * spec.dtype.bytes)),
    )


class ArgmaxRule(RegionRule):
    """``argmax`` matches: alone, and with the advance of the decode state."""

    name = "argmax"
    version = 1
    kinds = (kinds.ARGMAX,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Every agentcompile.argmax; then with the advance that only it feeds."""
        view = RegionView(graph=graph)
        found = []
        for node in graph.nodes:
            if node.op == operator_names.ARGMAX:
                found += _argmax(view, node)
        return found


def _argmax(view: RegionView, node: Node) -> list[Match]:
    logits = ref(argument(node, "logits"))
    if logits is None:
        return []
    spec = view.graph.spec(logits)
    if not spec.shape or spec.dtype not in KERNEL_TYPES or not is_contiguous(spec) or spec.numel != spec.shape[-1]:
        return []
    token = view.write("token", node.outputs[0])
    found = [_match(view, (node.name,), (view.read("logits", logits), token), spec.numel, False)]
    for user in view.users(node.outputs[0]):
        if user.op != operator_names.ADVANCE:
            continue
        states = {name: ref(argument(user, name)) for name in ("ids", "position", "history")}
        if ref(argument(user, "token")) == node.outputs[0] and None not in states.values():
            operands = [view.state(name, str(value)) for name, value in states.items()]
            found.append(_match(view, (node.name, user.name), (view.read("logits", logits), token, *operands), spec.numel, True))
    return found


def _match(view: RegionView, nodes: tuple[str, ...], operands: tuple[Operand, ...], n: int, advance: bool) -> Match:
    return Match(kind=ARGMAX, label=SemanticLabel.ARGMAX, nodes=nodes, operands=operands,
                 attributes=(("n", n), ("advance", advance)))
