"""The router of a mixture of experts for one token: the best of a softmax over all experts, or a softmax over the best of the logits."""

from collections.abc import Iterable

from attrs import evolve, frozen

from agentcompile_core.plugin_api import (
    KERNEL_TYPES,
    ROUTER,
    DType,
    Graph,
    Match,
    Node,
    RegionRule,
    RegionView,
    Target,
    argument,
    is_contiguous,
)

from . import expert_kinds

CHOICE = "aten.topk.default"
SOFTMAX = "aten.softmax.int"
CASTS = ("aten.to.dtype", "aten._to_copy.default", "aten.type_as.default", "aten.to.dtype_layout")


@frozen(kw_only=True)
class Routing:
    """What is known of a router while it is walked through: its nodes, the value before it and the weights behind it."""

    nodes: tuple[str, ...]
    logits: str
    scores: str
    normalized: bool = False

    def through(self, node: Node) -> "Routing":
        """The same with a node more behind it."""
        return evolve(self, nodes=(*self.nodes, node.name), scores=node.outputs[0])


class RouterRule(RegionRule):
    """``router`` matches: the choice of experts with the softmax before or behind it, the division by its sum, and casts."""

    name = "router"
    version = 1
    kinds = (expert_kinds.ROUTER,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """One match per choice of experts, the widest."""
        view = RegionView(graph=graph)
        for node in graph.nodes:
            match = _match(view, node) if node.op == CHOICE else None
            if match is not None:
                yield match


def _match(view: RegionView, choice: Node) -> Match | None:
    given = view.graph.spec(choice.inputs[0])
    if given.numel != given.shape[-1] or not _is_largest_first(view, choice):
        return None
    found = Routing(nodes=(choice.name,), logits=choice.inputs[0], scores=choice.outputs[0])
    before = _softmax_before(view, choice)
    if before is not None:
        found = _normalized(view, evolve(found, nodes=(before.name, choice.name), logits=before.inputs[0]))
    else:
        behind = _only_user(view, found.scores)
        if behind is None or not _is_softmax(view, behind):
            return None
        found = found.through(behind)
    found = _uncast(view, _cast(view, found))
    operands = (view.read("logits", found.logits), view.write("scores", found.scores), view.write("experts", choice.outputs[1]))
    logits, scores = operands[0].spec, operands[1].spec
    if logits.dtype not in KERNEL_TYPES or scores.dtype not in KERNEL_TYPES or not is_contiguous(view.graph.spec(found.logits)):
        return None
    attributes = (("experts", logits.numel), ("slots", scores.numel), ("over_chosen", found.normalized or before is None))
    return Match(kind=ROUTER, label=ROUTER, nodes=view.deps.members(view.deps.mask(found.nodes)), operands=operands, attributes=attributes)


def _is_largest_first(view: RegionView, node: Node) -> bool:
    axis, rank = argument(node, "dim"), len(view.graph.spec(node.inputs[0]).shape)
    last = isinstance(axis, int) and axis % rank == rank - 1
    return last and argument(node, "largest") is True and argument(node, "sorted") is True


def _is_softmax(view: RegionView, node: Node) -> bool:
    if node.op != SOFTMAX:
        return False
    axis, rank = argument(node, "dim"), len(view.graph.spec(node.inputs[0]).shape)
    return isinstance(axis, int) and axis % rank == rank - 1


def _softmax_before(view: RegionView, choice: Node) -> Node | None:
    """The softmax whose result is chosen from, in float32 (rounded probabilities tie where logits do not), and only that."""
    node = view.producer(choice.inputs[0])
    if node is None or not _is_softmax(view, node) or not view.only_used_by(node.outputs[0], {choice.name}):
        return None
    return node if view.graph.spec(node.outputs[0]).dtype is DType.F32 else None


def _only_user(view: RegionView, value: str) -> Node | None:
    users = view.users(value)
    return users[0] if len(users) == 1 and not view.leaves(value) else None


def _normalized(view: RegionView, found: Routing) -> Routing:
    """With the division by the sum of the weights, where that is all that is done with them."""
    users = view.users(found.scores)
    total = next((node for node in users if node.op == "aten.sum.dim_IntList"), None)
    ratio = next((node for node in users if node.op == "aten.div.Tensor"), None)
    if total is None or ratio is None or len(users) != 2 or view.leaves(found.scores):
        return found
    whole = view.graph.spec(total.outputs[0]).numel == 1 and argument(total, "keepdim") is True
    if not whole or ratio.inputs != (found.scores, total.outputs[0]) or not view.only_used_by(total.outputs[0], {ratio.name}):
        return found
    return evolve(found, nodes=(*found.nodes, total.name), normalized=True).through(ratio)


def _cast(view: RegionView, found: Routing) -> Routing:
    """With the cast of the weights behind it."""
    node = _only_user(view, found.scores)
    return found.through(node) if node is not None and node.op in CASTS else found


def _uncast(view: RegionView, found: Routing) -> Routing:
    """With the cast of the logits to float32 before it."""
    node = view.producer(found.logits)
    if node is None or node.op not in CASTS or not view.only_used_by(found.logits, set(found.nodes)):
        return found
    wider = view.graph.spec(found.logits).dtype is DType.F32 and view.graph.spec(node.inputs[0]).dtype in KERNEL_TYPES
    return evolve(found, nodes=(node.name, *found.nodes), logits=node.inputs[0]) if wider else found
