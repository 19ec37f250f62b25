"""Linear layers of one token: alone, with norm, bias, residual or activation, as Q/K/V siblings, as gate/up pair."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from attrs import evolve, frozen

from agentcompile_core.plugin_api import (
    KERNEL_TYPES,
    LINEAR,
    DType,
    Expression,
    Graph,
    Growth,
    Match,
    Node,
    Operand,
    Operation,
    PointwiseKind,
    Ref,
    RegionRule,
    RegionView,
    SemanticLabel,
    Target,
    argument,
    grow,
    is_contiguous,
    ref,
)

from . import normed_kinds
from .linear_inputs import Input, inputs_of
from .split import VECTOR_BYTES, lie_well, parts_of

MOST_AUX = 2


@frozen(kw_only=True)
class Linear:
    """A linear node of one token: its operands by value name."""

    node: Node
    x: str
    weight: str
    bias: str
    n: int
    k: int
    casts: tuple[str, ...] = ()  # of both operands to float32, which is what products are summed in

    @property
    def out(self) -> str:
        """The value it makes."""
        return self.node.outputs[0]


@frozen(kw_only=True)
class Product:
    """Linear layers over one input and what happens to their results: a match, but for what is before it.

    ``expression`` makes ``out`` of ``pair`` accumulators per result (None: they are the result) and the operands ``aux``.
    """

    group: Sequence[Linear]
    nodes: tuple[str, ...]
    out: Operand
    aux: Sequence[Operand] = ()
    pair: int = 1
    expression: Expression | None = None
    label: SemanticLabel


class LinearRule(RegionRule):
    """``linear`` matches: every linear node of one token, alone and with what can be fused before and behind it."""

    name = "linear"
    version = 5
    kinds = (normed_kinds.LINEAR,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """All groups of linear nodes over one input, with and without the norm before them and the pointwise tail."""
        view = RegionView(graph=graph)
        shared: dict[tuple[str, DType], list[Linear]] = {}
        for node in graph.nodes:
            linear = linear_of(view, node) or _widened_linear(view, node)
            if linear is not None:
                shared.setdefault((linear.x, graph.spec(linear.out).dtype), []).append(linear)
        found: list[Match] = []
        for group in shared.values():
            found += _matches_of_group(view, group)
        return found


def linear_of(view: RegionView, node: Node) -> Linear | None:
    """The linear layer of a node, if it serves one token with contiguous weights [n, k] of a kernel type."""
    if node.op != "aten.linear.default":
        return None
    x, weight, bias = (ref(argument(node, name)) for name in ("input", "weight", "bias"))
    if x is None or weight is None or not view.is_weight(Ref(weight)):
        return None
    spec, taken = view.graph.spec(weight), view.graph.spec(x)
    if len(spec.shape) != 2 or taken.numel != spec.shape[1] or not is_contiguous(taken) or spec.dtype not in KERNEL_TYPES:
        return None
    n, k = spec.shape
    if taken.dtype is not spec.dtype or (bias is not None and not view.is_weight(Ref(bias), n)):
        return None
    return Linear(node=node, x=x, weight=weight, bias=bias or "", n=n, k=k)


def _widened_linear(view: RegionView, node: Node) -> Linear | None:
    """The linear layer of a node whose operands are cast from one narrower type to float32, read before the casts."""
    if node.op != "aten.linear.default" or argument(node, "bias") is not None:
        return None
    x, weight = (_before_cast(view, ref(argument(node, name)), node) for name in ("input", "weight"))
    if x is None or weight is None or not view.is_weight(Ref(weight[0])):
        return None
    spec, taken = view.graph.spec(weight[0]), view.graph.spec(x[0])
    if len(spec.shape) != 2 or taken.numel != spec.shape[1] or not is_contiguous(taken) or not is_contiguous(spec):
        return None
    if taken.dtype is not spec.dtype or spec.dtype not in KERNEL_TYPES:
        return None
    return Linear(node=node, x=x[0], weight=weight[0], bias="", n=spec.shape[0], k=spec.shape[1], casts=(*x[1], *weight[1]))


def _before_cast(view: RegionView, value: str | None, node: Node) -> tuple[str, tuple[str, ...]] | None:
    """What ``value`` is cast from, and the cast where nothing else reads its result."""
    cast = view.producer(value) if value is not None else None
    if cast is None or value is None or cast.kind != "cast" or view.graph.spec(value).dtype is not DType.F32:
        return None
    return cast.inputs[0], (cast.name,) if view.only_used_by(value, {node.name}) else ()


def _matches_of_group(view: RegionView, group: list[Linear]) -> Iterator[Match]:
    """``group`` are all linear nodes over one value, in graph order."""
    for linear in group:
        yield from _single(view, linear, alone=len(group) == 1)
        yield from _split(view, linear)
    paired: set[str] = set()
    for one, other in combinations(group, 2):
        for match in _pair(view, one, other):
            paired.update((one.out, other.out))
            yield match
    attending = [linear for linear in group if _feeds_attention(view, linear)]
    for siblings in [attending] + [group] * (len(attending) < len(group)):
        if len(siblings) > 1 and not paired.issuperset(linear.out for linear in siblings):
            yield from _siblings(view, siblings)


def _single(view: RegionView, linear: Linear, *, alone: bool) -> Iterator[Match]:
    """``alone``: nothing but this layer multiplies its input; else layers beside each other take in a norm that others read as well."""
    inside = frozenset({linear.node.name, *linear.casts})
    bias = [linear.bias] if linear.bias else []
    plain = _bias_expression() if bias else None
    grown = grow(view, {linear.out: "acc0"}, inside, prefix="aux", limit=MOST_AUX - len(bias),
                 fits=lambda value: view.graph.spec(value).numel == linear.n)
    tails: list[tuple[Growth | None, Expression | None]] = [(None, plain)]
    tails += [(growth, _with_biases(growth.expression, [bool(bias)])) for growth in grown]
    for growth, expression in tails:
        nodes = (linear.node.name, *linear.casts, *(growth.nodes if growth else ()))
        external = growth.external if growth else ()
        out = view.write("out", growth.output if growth else linear.out)
        aux = [view.read(f"aux{i}", value) for i, value in enumerate([*bias, *external])]
        product = Product(group=[linear], nodes=nodes, out=out, aux=aux, expression=expression, label=SemanticLabel.GEMV)
        yield from _with_norm(view, product, may_share=alone)


def _pair(view: RegionView, one: Linear, other: Linear) -> Iterator[Match]:
    if (one.n, one.k) != (other.n, other.k) or bool(one.bias) != bool(other.bias):
        return
    gate, up = (other, one) if _is_activated(view, other) and not _is_activated(view, one) else (one, other)
    inside = frozenset({one.node.name, other.node.name, *one.casts, *other.casts})
    biases = [gate.bias, up.bias] if gate.bias else []
    for growth in grow(view, {gate.out: "acc0", up.out: "acc1"}, inside, prefix="aux", limit=MOST_AUX - len(biases),
                       fits=lambda value: view.graph.spec(value).numel == gate.n):
        aux = [view.read(f"aux{i}", value) for i, value in enumerate([*biases, *growth.external])]
        expression = _with_biases(growth.expression, [True, True] if biases else [])
        yield from _with_norm(view, Product(group=[gate, up], nodes=(*inside, *growth.nodes), out=view.write("out", growth.output),
                                            aux=aux, pair=2, expression=expression, label=SemanticLabel.GATED_MLP))


def _split(view: RegionView, linear: Linear) -> Iterator[Match]:
    """One matrix whose result is cut: the parts lie side by side as they are; two halves may be a gate and its product."""
    found = parts_of(view, linear.out)
    if found is None:
        return
    parts, cuts = found
    nodes = (linear.node.name, *linear.casts, *cuts)
    label = SemanticLabel.QKV_PROJECTION if all(_leads_to_attention(view, part) for part in parts) else SemanticLabel.GEMV
    aux = [view.read("aux0", linear.bias)] if linear.bias else []
    yield from _with_norm(view, Product(group=[linear], nodes=nodes, out=view.write("out", *parts), aux=aux,
                                        expression=_bias_expression() if aux else None, label=label))
    if linear.bias or len(parts) != 2 or view.graph.spec(parts[0]).numel != view.graph.spec(parts[1]).numel:
        return
    for growth in grow(view, {parts[0]: "acc0", parts[1]: "acc1"}, frozenset(nodes), prefix="aux", limit=MOST_AUX,
                       fits=lambda value: view.graph.spec(value).numel * 2 == linear.n):
        aux = [view.read(f"aux{i}", value) for i, value in enumerate(growth.external)]
        yield from _with_norm(view, Product(group=[linear], nodes=(*nodes, *growth.nodes), out=view.write("out", growth.output),
                                            aux=aux, pair=2, expression=growth.expression, label=SemanticLabel.GATED_MLP))


def _siblings(view: RegionView, siblings: list[Linear]) -> Iterator[Match]:
    group = sorted(siblings, key=lambda linear: view.graph.spec(linear.out).nbytes % VECTOR_BYTES != 0)  # whole vectors come first
    biases = [linear.bias for linear in group if linear.bias]
    if biases and len(biases) != len(group):
        return
    label = SemanticLabel.QKV_PROJECTION if all(_feeds_attention(view, linear) for linear in group) else SemanticLabel.GEMV
    aux = [view.read("aux0", *biases)] if biases else []
    nodes = tuple(name for linear in group for name in (linear.node.name, *linear.casts))
    cut = [parts_of(view, linear.out) for linear in group]
    forms = [(nodes, [linear.out for linear in group])]
    if any(cut):
        outs = [part for linear, found in zip(group, cut, strict=True) for part in (found[0] if found else (linear.out,))]
        forms.append(((*nodes, *(name for found in cut if found for name in found[1])), outs))
    for taken, outs in forms:
        if not lie_well(view, outs):
            continue
        yield from _with_norm(view, Product(group=group, nodes=taken, out=view.write("out", *outs), aux=aux, label=label,
                                            expression=_bias_expression() if biases else None))


def _with_norm(view: RegionView, product: Product, *, may_share: bool = True) -> Iterator[Match]:
    """The match as it is and with the norm or the rounding before it as its prologue, where nothing else reads them, or, of a norm, where
    it ``may_share`` it."""
    first = product.group[0]
    for given in inputs_of(view, first.x, frozenset(product.nodes), view.graph.spec(first.weight).dtype):
        if given.normed and not may_share:
            continue
        fused = SemanticLabel.NORM_GEMV if given.norm is not None and product.label == SemanticLabel.GEMV else product.label
        yield _match(view, evolve(product, nodes=(*given.nodes, *product.nodes), label=fused), given)


def _match(view: RegionView, product: Product, given: Input) -> Match:
    first, weight = product.group[0], view.read("weight", *(linear.weight for linear in product.group))
    sizes = (("n", sum(linear.n for linear in product.group) // product.pair), ("k", first.k), ("pair", product.pair))
    return Match(kind=LINEAR, label=product.label, nodes=view.deps.members(view.deps.mask(product.nodes)),
                 operands=(view.read("x", given.x), weight, *given.read(view), *product.aux, product.out, *given.written(view)),
                 attributes=(*sizes, *given.attributes), epilogue=_scaled(product.expression, product.pair, given.scale))


def _bias_expression() -> Expression:
    return Expression(arguments=("acc0", "aux0"), operations=(Operation(PointwiseKind.ADD, ("acc0", "aux0")),))


def _scaled(tail: Expression | None, pair: int, scale: float) -> Expression | None:
    """``tail`` over accumulators that are first multiplied with a number: what a layer makes of its operand times that number."""
    if scale == 1.0:
        return tail
    first = [Operation(PointwiseKind.MUL, (f"acc{i}", scale)) for i in range(pair)]
    if tail is None:
        return Expression(arguments=("acc0",), operations=tuple(first))
    return _behind(first, tail, {})


def _behind(first: Sequence[Operation], tail: Expression, renamed: dict[str, str]) -> Expression:
    """``tail`` over what ``first`` makes of the accumulators, its other operands ``renamed``."""
    made: dict[str, str | int] = {f"acc{i}": i for i in range(len(first))} | renamed  # type: ignore[assignment]

    def operand(given: str | int | float) -> str | int | float:
        if isinstance(given, str):
            return made.get(given, given)
        return given + len(first) if type(given) is int else given

    rest = [Operation(op.kind, tuple(operand(o) for o in op.operands)) for op in tail.operations]
    arguments = (*(a for a in tail.arguments if a.startswith("acc")), *(renamed.get(a, a) for a in tail.arguments if a.startswith("aux")))
    return Expression(arguments=arguments, operations=(*first, *rest))


def _with_biases(tail: Expression, biased: list[bool]) -> Expression:
    """``tail`` over accumulators that first get their biases; its own auxiliary operands move up behind the biases.

    acc0 * in, biased [True] -> (acc0 + aux0) * in', where in' was aux0 and is aux1.
    """
    count = sum(biased)
    if not count:
        return tail
    first = [Operation(PointwiseKind.ADD, (f"acc{i}", f"aux{i}")) for i in range(count)]
    external = [a for a in tail.arguments if a.startswith("aux")]
    behind = _behind(first, tail, {name: f"aux{int(name[3:]) + count}" for name in external})
    accumulators = [a for a in tail.arguments if a.startswith("acc")]
    return evolve(behind, arguments=(*accumulators, *(f"aux{i}" for i in range(count + len(external)))))


def _is_activated(view: RegionView, linear: Linear) -> bool:
    users = view.users(linear.out)
    return len(users) == 1 and len(users[0].inputs) == 1 and not view.is_free(users[0])


def _feeds_attention(view: RegionView, linear: Linear) -> bool:
    return _leads_to_attention(view, linear.out)


def _leads_to_attention(view: RegionView, value: str) -> bool:
    """Whether a value goes to an attention node through nothing but views, norms and rope."""
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        for user in view.users(value):
            if user.kind == "attention":
                return True
            if user.name not in seen and user.kind in ("view", "rms_norm", "rope"):
                seen.add(user.name)
                waiting.extend(user.outputs)
    return False
