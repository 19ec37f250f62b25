"""Linear layers of the chosen experts of one token: gate and up with their activation, also with the router before them, down with the
weighted sum over the slots."""

from collections.abc import Iterable, Iterator, Sequence

from attrs import evolve, frozen

from agentcompile_core.plugin_api import (
    EXPERT_LINEAR,
    KERNEL_TYPES,
    DType,
    Expression,
    Graph,
    Growth,
    Match,
    Node,
    Operand,
    Ref,
    RegionRule,
    RegionView,
    Target,
    argument,
    grow,
    is_contiguous,
    operator_names,
    ref,
    unread_bytes,
)

from . import expert_kinds
from .router import router_of

MOST_AUX = 2
ROUTER_OPERANDS = {"logits": "logits", "bias": "router_bias", "scores": "scores", "experts": "choice"}  # of a router in front


@frozen(kw_only=True)
class Experts:
    """An ``expert_linear`` node of one token: its operands by value name, its sizes in elements."""

    node: Node
    x: str
    weight: str
    experts: str
    bias: str
    slots: int
    rows: int  # of each expert's matrix
    k: int
    transposed: bool

    @property
    def out(self) -> str:
        """The value it makes, [1, slots, rows]."""
        return self.node.outputs[0]


@frozen(kw_only=True)
class Tail:
    """What happens to the results of the layer: a match, but for its operands before that."""

    nodes: tuple[str, ...]
    out: str
    expression: Expression | None = None
    pair: int = 1
    interleaved: bool = False
    scale: str = ""
    aux: Sequence[str] = ()


class ExpertRule(RegionRule):
    """``expert_linear`` matches: each layer alone, with the activation behind it, or with the weighted sum and what follows; all but sums
    also with the router that chooses the experts."""

    name = "expert_linear"
    version = 2
    kinds = (expert_kinds.EXPERT_LINEAR,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Every layer of one token with every tail that one kernel could take in."""
        view = RegionView(graph=graph)
        for node in graph.nodes:
            layer = experts_of(view, node)
            if layer is None:
                continue
            router = _router(view, layer)
            for tail in _tails(view, layer):
                match = _match(view, layer, tail)
                yield match
                routed = _routed(view, match, router) if router is not None and not tail.scale else None
                if routed is not None:
                    yield routed


def experts_of(view: RegionView, node: Node) -> Experts | None:
    """The layer of a node, if it serves one token with matrices of a kernel type that lie in one piece."""
    if node.op != operator_names.EXPERT_LINEAR:
        return None
    x, weight, experts, bias = (ref(argument(node, name)) for name in ("x", "weight", "experts", "bias"))
    if x is None or weight is None or experts is None or not view.is_weight(Ref(weight)):
        return None
    matrices, taken, chosen = (view.graph.spec(name) for name in (weight, x, experts))
    transposed = bool(argument(node, "transposed"))
    k, rows = matrices.shape[1:] if transposed else matrices.shape[:0:-1]
    alike = taken.dtype is matrices.dtype and matrices.dtype in KERNEL_TYPES and chosen.dtype is DType.I64
    if not alike or chosen.shape[0] != 1 or not is_contiguous(taken) or not is_contiguous(chosen):
        return None
    if bias is not None and not (view.is_weight(Ref(bias)) and view.graph.spec(bias).dtype is matrices.dtype):
        return None
    return Experts(node=node, x=x, weight=weight, experts=experts, bias=bias or "", slots=chosen.numel, rows=rows, k=k,
                   transposed=transposed)


def _tails(view: RegionView, layer: Experts) -> Iterator[Tail]:
    alone = (layer.node.name,)
    yield Tail(nodes=alone, out=layer.out)
    for growth in grow(view, {layer.out: "acc0"}, frozenset(alone), prefix="aux", limit=0, fits=lambda _: False):
        yield _grown(alone, growth)
    value, views = view.forward(layer.out)
    halves = _halves(view, value)
    if halves is not None:
        parts, cuts, interleaved = halves
        nodes = (*alone, *views, *cuts)
        seeds = {part: f"acc{i}" for i, part in enumerate(parts)}
        for growth in grow(view, seeds, frozenset(nodes), prefix="aux", limit=0, fits=lambda _: False):
            yield _grown(nodes, growth, Tail(nodes=(), out="", pair=2, interleaved=interleaved))
    weighted = _weighted_sum(view, layer, value)
    if weighted is not None:
        scale, total, added = weighted
        plain = Tail(nodes=(*alone, *views, *added), out=total, scale=scale)
        yield plain
        for growth in grow(view, {total: "acc0"}, frozenset(plain.nodes), prefix="aux", limit=MOST_AUX,
                           fits=lambda value: view.graph.spec(value).numel == layer.rows):
            yield _grown(plain.nodes, growth, plain)


def _grown(nodes: tuple[str, ...], growth: Growth, base: Tail | None = None) -> Tail:
    base = base or Tail(nodes=(), out="")
    return Tail(nodes=(*nodes, *growth.nodes), out=growth.output, expression=growth.expression, pair=base.pair,
                interleaved=base.interleaved, scale=base.scale, aux=growth.external)


def _halves(view: RegionView, value: str) -> tuple[tuple[str, str], tuple[str, ...], bool] | None:
    """The two parts that the last axis of ``value`` is read in, the nodes that cut it, and whether it is cut row by row."""
    users, width = view.users(value), view.graph.spec(value).shape[-1]
    if view.leaves(value) or width % 2:
        return None
    if len(users) == 1 and users[0].op in operator_names.SPLITS and len(users[0].outputs) == 2:
        first, second = users[0].outputs
        even = all(view.graph.spec(part).shape[-1] == width // 2 for part in (first, second))
        return ((first, second), (users[0].name,), False) if even and _along_last(view, users[0], value) else None
    cuts = {_cut(view, node, value, width): node for node in users}
    for interleaved, wanted in ((False, ((0, 1), (width // 2, 1))), (True, ((0, 2), (1, 2)))):
        if set(cuts) == set(wanted):
            nodes = [cuts[each] for each in wanted]
            return (nodes[0].outputs[0], nodes[1].outputs[0]), tuple(node.name for node in nodes), interleaved
    return None


def _along_last(view: RegionView, node: Node, value: str) -> bool:
    axis, rank = argument(node, "dim"), len(view.graph.spec(value).shape)
    return isinstance(axis, int) and axis % rank == rank - 1


def _cut(view: RegionView, node: Node, value: str, width: int) -> tuple[int, int] | None:
    """First element and step of a slice of half of the last axis."""
    if node.op != "aten.slice.Tensor" or not _along_last(view, node, value) or view.graph.spec(node.outputs[0]).shape[-1] != width // 2:
        return None
    first, step = argument(node, "start"), argument(node, "step")
    first = 0 if first is None else first
    return (first + width if first < 0 else first, step) if isinstance(first, int) and isinstance(step, int) else None


def _weighted_sum(view: RegionView, layer: Experts, value: str) -> tuple[str, str, tuple[str, ...]] | None:
    """The weights of the slots, the sum of the results weighted with them, and the nodes that make it."""
    users, shape = view.users(value), view.graph.spec(value).shape
    if view.leaves(value) or len(users) != 1 or users[0].op != "aten.mul.Tensor":
        return None
    factors = [name for name in users[0].inputs if name != value]
    product = users[0].outputs[0]
    after = view.users(product)
    if len(factors) != 1 or view.leaves(product) or len(after) != 1 or after[0].op != "aten.sum.dim_IntList":
        return None
    scale, total = view.graph.spec(factors[0]), view.graph.spec(after[0].outputs[0])
    axes = argument(after[0], "dim")
    kept = {len(shape) - 1, *(axis for axis, extent in enumerate(shape) if extent == 1)}
    if not isinstance(axes, tuple) or {a % len(shape) for a in axes if isinstance(a, int)} | kept != set(range(len(shape))):
        return None
    fits = scale.shape == (*shape[:-1], 1) and is_contiguous(scale) and scale.dtype in (DType.F32, view.graph.spec(layer.weight).dtype)
    whole = total.numel == layer.rows and total.dtype in KERNEL_TYPES and (len(shape) - 1) not in [a % len(shape) for a in axes]  # type: ignore[operator]
    return (factors[0], after[0].outputs[0], (users[0].name, after[0].name)) if fits and whole else None


def _match(view: RegionView, layer: Experts, tail: Tail) -> Match:
    operands: list[Operand] = [view.read("x", layer.x), view.read("weight", layer.weight), view.read("experts", layer.experts)]
    operands += [view.read("bias", layer.bias)] if layer.bias else []
    operands += [view.read("scale", tail.scale)] if tail.scale else []
    operands += [view.read(f"aux{i}", value) for i, value in enumerate(tail.aux)]
    attributes = (
        ("n", layer.rows // tail.pair), ("k", layer.k), ("slots", layer.slots), ("experts", view.graph.spec(layer.weight).shape[0]),
        ("pair", tail.pair), ("interleaved", tail.interleaved), ("transposed", layer.transposed),
        ("shared", layer.slots > 1 and view.graph.spec(layer.x).numel == layer.k), ("summed", bool(tail.scale)),
        ("unread_bytes", unread_bytes(layer.node, view.graph)),
    )
    return Match(kind=EXPERT_LINEAR, label=EXPERT_LINEAR, nodes=view.deps.members(view.deps.mask(tail.nodes)),
                 operands=(*operands, view.write("out", tail.out)), attributes=attributes, epilogue=tail.expression)


def _router(view: RegionView, layer: Experts) -> Match | None:
    """The match of the router that chooses the experts of a layer."""
    choice = view.producer(view.back(layer.experts, {layer.node.name})[0])
    return router_of(view, choice) if choice is not None else None


def _routed(view: RegionView, match: Match, router: Match) -> Match | None:
    """A layer with its router in front, whose choice and scores others read too; None: something lies between them, or the router has not a
    logit for each matrix."""
    mask = view.deps.mask((*router.nodes, *match.nodes))
    if any(router.integer(name) != match.integer(name) for name in ("experts", "slots")):
        return None
    if not view.deps.is_convex(mask) or router.need("experts").values[0] != view.back(match.need("experts").values[0], set())[0]:
        return None
    kept = [operand for operand in match.operands if operand.name != "experts"]
    taken = [evolve(operand, name=ROUTER_OPERANDS[operand.name]) for operand in router.operands]
    said = dict(router.attributes)
    attributes = (("routed", True), *((name, said[name]) for name in ("over_chosen", "scoring", "floored", "eps", "factor")))
    return evolve(match, nodes=view.deps.members(mask), operands=(*kept, *taken), attributes=(*match.attributes, *attributes))
