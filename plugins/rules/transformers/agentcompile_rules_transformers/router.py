"""The router of a mixture of experts for one token: the best of all experts by score, or a softmax over the best of the logits."""

from collections.abc import Iterable

from attrs import evolve, frozen

from agentcompile_core.plugin_api import (
    KERNEL_TYPES,
    ROUTER,
    DType,
    Graph,
    Match,
    Node,
    Ref,
    RegionRule,
    RegionView,
    Target,
    argument,
    is_contiguous,
)

from . import expert_kinds

CHOICE = "aten.topk.default"
SOFTMAX, SIGMOID = "aten.softmax.int", "aten.sigmoid.default"
FLOORS = ("aten.clamp_min.default", "aten.clamp.default")
GUARDS = ("aten.add.Tensor", "aten.add.Scalar", *FLOORS)
CASTS = ("aten.to.dtype", "aten._to_copy.default", "aten.type_as.default", "aten.to.dtype_layout")


@frozen(kw_only=True)
class Routing:
    """What is known of a router while it is walked through: its nodes, the value before it and the weights behind it."""

    nodes: tuple[str, ...]
    logits: str
    scores: str
    normalized: bool = False
    before: bool = True  # whether the scores are made before the choice
    scoring: str = "softmax"
    bias: str = ""
    eps: float = 0.0
    floored: bool = False
    factor: float = 1.0

    @property
    def scored(self) -> bool:
        """Whether the choice is among the scores themselves, not among the logits."""
        return bool(self.bias) or self.scoring == "sigmoid"

    def through(self, node: Node) -> "Routing":
        """The same with a node more behind it."""
        return evolve(self, nodes=(*self.nodes, node.name), scores=node.outputs[0])


class RouterRule(RegionRule):
    """``router`` matches: the choice of experts with the scores before or behind it, bias, the division by their sum, factor and casts."""

    name = "router"
    version = 2
    kinds = (expert_kinds.ROUTER,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """One match per choice of experts, the widest."""
        view = RegionView(graph=graph)
        for node in graph.nodes:
            match = router_of(view, node)
            if match is not None:
                yield match


def router_of(view: RegionView, choice: Node) -> Match | None:
    """The widest match of a choice of experts for one token; None: the node is none, or nothing serves it."""
    if choice.op != CHOICE:
        return None
    given = view.graph.spec(choice.inputs[0])
    if given.numel != given.shape[-1] or not _is_largest_first(view, choice):
        return None
    found = _biased(view, choice) or _scored_before(view, choice) or _scored_behind(view, choice)
    if found is None:
        return None
    found = _uncast(view, _cast(view, _scaled(view, found) if found.scored else found))
    operands = [view.read("logits", found.logits), *([view.read("bias", found.bias)] if found.bias else []),
                view.write("scores", found.scores), view.write("experts", choice.outputs[1])]
    logits, scores = operands[0].spec, operands[-2].spec
    if logits.dtype not in KERNEL_TYPES or scores.dtype not in KERNEL_TYPES or not is_contiguous(view.graph.spec(found.logits)):
        return None
    attributes = (("experts", logits.numel), ("slots", scores.numel), ("over_chosen", found.normalized or not found.before),
                  ("scoring", found.scoring), ("eps", found.eps), ("floored", found.floored), ("factor", found.factor))
    return Match(kind=ROUTER, label=ROUTER, nodes=view.deps.members(view.deps.mask(found.nodes)), operands=tuple(operands),
                 attributes=attributes)


def _biased(view: RegionView, choice: Node) -> Routing | None:
    """A choice among scores and a bias, and the scores of the chosen without it."""
    node = view.producer(choice.inputs[0])
    if node is None or node.op != "aten.add.Tensor" or node.kwargs or len(node.inputs) != 2 or view.users(choice.outputs[0]):
        return None
    picked = _only_picked(view, choice)
    for value, other in (node.inputs, node.inputs[::-1]):
        bias, views = view.back(other, {node.name})
        made = view.producer(value)
        weight = view.is_weight(Ref(bias), view.graph.spec(value).numel) and view.graph.spec(bias).dtype in KERNEL_TYPES
        if not weight or made is None or picked is None or picked.inputs[0] != value or not _is_score(view, made):
            continue
        taken = (made.name, *views, node.name, choice.name, picked.name)
        if view.only_used_by(value, set(taken)) and view.only_used_by(node.outputs[0], {choice.name}):
            found = Routing(nodes=taken, logits=made.inputs[0], scores=picked.outputs[0], scoring=_scoring(made), bias=bias)
            return _normalized(view, found)
    return None


def _only_picked(view: RegionView, choice: Node) -> Node | None:
    """The node that picks elements of a row by the indices that were chosen."""
    picks = [node for node in view.users(choice.outputs[1]) if node.op == "aten.gather.default" and node.inputs[1:] == (choice.outputs[1],)]
    return picks[0] if len(picks) == 1 and not view.leaves(choice.outputs[0]) else None


def _scored_before(view: RegionView, choice: Node) -> Routing | None:
    node = view.producer(choice.inputs[0])
    if node is None or not _is_score(view, node) or not view.only_used_by(node.outputs[0], {choice.name}):
        return None
    found = Routing(nodes=(node.name, choice.name), logits=node.inputs[0], scores=choice.outputs[0], scoring=_scoring(node))
    return _normalized(view, found)


def _scored_behind(view: RegionView, choice: Node) -> Routing | None:
    behind = _only_user(view, choice.outputs[0])
    if behind is None or not _is_softmax(view, behind):
        return None
    return Routing(nodes=(choice.name,), logits=choice.inputs[0], scores=choice.outputs[0], before=False).through(behind)


def _is_score(view: RegionView, node: Node) -> bool:
    """A softmax or sigmoid in float32: rounded probabilities tie where logits do not."""
    known = _is_softmax(view, node) or node.op == SIGMOID
    return known and view.graph.spec(node.outputs[0]).dtype is DType.F32


def _scoring(node: Node) -> str:
    return "sigmoid" if node.op == SIGMOID else "softmax"


def _is_largest_first(view: RegionView, node: Node) -> bool:
    axis, rank = argument(node, "dim"), len(view.graph.spec(node.inputs[0]).shape)
    last = isinstance(axis, int) and axis % rank == rank - 1
    return last and argument(node, "largest") is True and argument(node, "sorted") is True


def _is_softmax(view: RegionView, node: Node) -> bool:
    if node.op != SOFTMAX:
        return False
    axis, rank = argument(node, "dim"), len(view.graph.spec(node.inputs[0]).shape)
    return isinstance(axis, int) and axis % rank == rank - 1


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
    guard = _only_user(view, total.outputs[0]) if found.scored else None
    eps = _number_of(guard) if guard is not None and guard.op in GUARDS else None
    last = guard if guard is not None and eps is not None else total
    if not whole or ratio.inputs != (found.scores, last.outputs[0]) or not view.only_used_by(last.outputs[0], {ratio.name}):
        return found
    nodes = (*found.nodes, *dict.fromkeys((total.name, last.name)))
    return evolve(found, nodes=nodes, normalized=True, eps=eps or 0.0, floored=last.op in FLOORS).through(ratio)


def _number_of(node: Node) -> float | None:
    """The one finite number that a node computes with beside its operand."""
    rest = [value for value in (*node.args[1:], *(value for _, value in node.kwargs)) if value is not None]
    return float(rest[0]) if len(rest) == 1 and isinstance(rest[0], int | float) and len(node.inputs) == 1 else None


def _scaled(view: RegionView, found: Routing) -> Routing:
    """With the factor of the weights behind it."""
    node = _only_user(view, found.scores)
    factor = _number_of(node) if node is not None and node.op in ("aten.mul.Tensor", "aten.mul.Scalar") else None
    return evolve(found, factor=factor).through(node) if node is not None and factor is not None else found


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
