"""One token of a linear recurrence whose state is written in place, bare and with the small nodes that make its operands."""

from collections.abc import Iterable, Iterator

from attrs import evolve, frozen

from agentcompile_core.plugin_api import (
    KERNEL_TYPES,
    RECURRENCE_STEP,
    DType,
    Expression,
    Graph,
    Match,
    Node,
    Ref,
    RegionRule,
    RegionView,
    Scalar,
    Target,
    argument,
    is_contiguous,
    operator_names,
    ref,
)

from . import recurrence_kinds
from .parts import strides_of
from .peeling import Peel
from .state_write import StateWrite, state_write
from .tails import runs_behind


@frozen(kw_only=True)
class Operands:
    """Operands of a step by name, as far as they are there, nodes that are taken in with them, and attributes that say how."""

    values: dict[str, str]
    nodes: tuple[str, ...] = ()
    attributes: tuple[tuple[str, Scalar], ...] = ()

    def having(self, name: str, peel: Peel, *attributes: tuple[str, Scalar]) -> "Operands":
        """With one more operand, or another value of it."""
        return evolve(self, values={**self.values, name: peel.value}, nodes=(*self.nodes, *peel.nodes),
                      attributes=(*self.attributes, *attributes))


class RecurrenceStepRule(RegionRule):
    """``recurrence_step`` matches: recurrences of one token whose last state goes over the first."""

    name = "recurrence_step"
    version = 1
    kinds = (recurrence_kinds.RECURRENCE_STEPS,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Bare, then with what makes the operands, then with growing tails of pointwise nodes."""
        view = RegionView(graph=graph)
        return [match for node in graph.nodes if node.op == operator_names.RECURRENCE for match in _matches(view, node)]


def _matches(view: RegionView, node: Node) -> Iterator[Match]:
    sizes = _sizes(view, node)
    write = state_write(view, node)
    if sizes is None or write is None or argument(node, "valid") is not None:
        return
    inside = frozenset({node.name, *write.nodes})
    bare = Operands(values={})
    for name in ("x", "keys", "queries", "decay", "rates", "strength", "skip"):
        given = ref(argument(node, name))
        if given is not None:
            bare = bare.having(name, Peel(view, given, inside).viewed())
    state_bytes = 2 * view.graph.spec(write.state).nbytes
    attributes = (*sizes, ("scaled", argument(node, "scaled") is True), ("state_bytes", state_bytes))
    peeled = _peeled(view, node, inside, bare)
    for operands in (bare, peeled) if peeled != bare else (bare,):
        yield from _tailed(view, node, write, evolve(operands, attributes=(*attributes, *operands.attributes)))


def _sizes(view: RegionView, node: Node) -> tuple[tuple[str, Scalar], ...] | None:
    """Attributes of a recurrence of one token, if its state lies row by row or term by term."""
    x, keys, decay = (view.graph.spec(str(ref(argument(node, name)))) for name in ("x", "keys", "decay"))
    state, rates = ref(argument(node, "state")), ref(argument(node, "rates"))
    if state is None or len(x.shape) != 4 or x.shape[:2] != (1, 1):
        return None
    heads, width, groups, terms = x.shape[2], x.shape[3], keys.shape[2], keys.shape[3]
    steps = strides_of(view.graph.spec(state))
    by_terms = steps[3] == 1 and (steps[2] == terms or width == 1)
    by_rows = not by_terms and steps[2] == 1 and steps[3] == width
    if not (by_terms or by_rows) or (heads > 1 and steps[1] != width * terms):
        return None
    return (("heads", heads), ("width", width), ("terms", terms), ("groups", groups), ("by_rows", by_rows),
            ("decay_each", decay.numel // heads), ("rates_each", view.graph.spec(rates).numel // heads if rates is not None else 0))


def _peeled(view: RegionView, node: Node, inside: frozenset[str], bare: Operands) -> Operands:
    """The operands before the casts, norms and activations that make them."""
    found = Operands(values={})

    def of(name: str) -> Peel | None:
        given = ref(argument(node, name))
        return Peel(view, given, inside | frozenset(found.nodes)) if given is not None else None

    for name in bare.values:
        peel = of(name)
        assert peel is not None
        if name in ("keys", "queries"):
            found = _line(found, name, peel, view.graph.spec(str(ref(argument(node, "keys")))).shape[3])
        elif name == "decay":
            found = _decay(found, peel, is_whole="rates" in bare.values or argument(node, "scaled") is True)
        elif name == "rates":
            found = _rates(found, peel)
        elif name == "strength":
            found = _strength(found, peel)
        else:
            found = found.having(name, peel.widened())
    return found


def _line(found: Operands, name: str, peel: Peel, terms: int) -> Operands:
    scale, at = 1.0, peel
    scaled = peel.scaled()
    if scaled is not None and name == "queries":
        at, scale = scaled
    normed = at.normed(terms)
    if normed is None:
        return found.having(name, peel.widened())
    attributes: list[tuple[str, Scalar]] = [(f"{name}_eps", normed[1])]
    return found.having(name, normed[0].widened(), *attributes, *([("queries_scale", scale)] if name == "queries" else []))


def _decay(found: Operands, peel: Peel, is_whole: bool) -> Operands:
    """``softplus(decay + bias)``; times a rate that each head has, where the recurrence reads their product alone (not ``is_whole``)."""
    if is_whole:
        softened = _softened(found, peel)
        return softened if softened is not None else found.having("decay", peel.widened())
    product = peel.viewed().producer
    if product is not None and product.op == "aten.mul.Tensor" and len(product.inputs) == 2:
        for rates, step in (product.inputs, product.inputs[::-1]):
            behind = peel.viewed().taking(step, [product.name])
            heads = peel.numel
            if behind is None or behind.numel != heads or peel.view.graph.spec(rates).numel != heads:
                continue
            softened = _softened(found, behind)
            of_rates = evolve(behind, value=rates, nodes=())
            if softened is not None and len(peel.view.graph.spec(peel.value).shape) == 3:
                taken = evolve(of_rates, inside=of_rates.inside | {product.name, *softened.nodes})
                return _rates(evolve(softened, attributes=(*softened.attributes, ("rates_each", 1))), taken)
    return found.having("decay", peel.widened())


def _softened(found: Operands, peel: Peel) -> Operands | None:
    soft = peel.widened().softened()
    if soft is None:
        return None
    summed = soft.widened().summed()
    if summed is None:
        return found.having("decay", soft.widened(), ("softplus", True))
    step, other = summed
    bias = evolve(step, value=other).widened()
    if not bias.numel == step.numel == soft.numel:
        return found.having("decay", soft.widened(), ("softplus", True))
    whole = evolve(step, nodes=bias.nodes).widened()
    if peel.view.is_weight(Ref(whole.value)) and not peel.view.is_weight(Ref(bias.value)):
        whole, bias = evolve(whole, value=bias.value), evolve(bias, value=whole.value)
    return found.having("decay", whole, ("softplus", True)).having("decay_bias", evolve(bias, nodes=()))


def _rates(found: Operands, peel: Peel) -> Operands:
    negative = peel.before("aten.neg.default")
    logarithm = negative.before("aten.exp.default") if negative is not None else None
    if logarithm is None:
        return found.having("rates", peel.widened())
    return found.having("rates", logarithm.widened(), ("log_rates", True))


def _strength(found: Operands, peel: Peel) -> Operands:
    scaled = peel.widened().scaled()
    at, scale = scaled if scaled is not None else (peel, 1.0)
    sigmoid = at.widened().before("aten.sigmoid.default")
    if sigmoid is None:
        return found.having("strength", peel.widened())
    return found.having("strength", sigmoid.widened(), ("sigmoid", True), ("strength_scale", scale))


def _tailed(view: RegionView, node: Node, write: StateWrite, operands: Operands) -> Iterator[Match]:
    """The match, and those with pointwise nodes behind the result."""
    if any(view.graph.spec(value).dtype not in KERNEL_TYPES or not is_contiguous(view.graph.spec(value))
           for value in operands.values.values()) or view.graph.spec(write.state).dtype is not DType.F32:
        return
    nodes = (node.name, *write.nodes, *operands.nodes)
    made = node.outputs[0]
    yield _match(view, write, operands, nodes, made)
    numel = view.graph.spec(made).numel

    def fits(value: str) -> bool:
        return view.graph.spec(value).numel == numel and is_contiguous(view.graph.spec(value))

    for tail in runs_behind(view, made, frozenset(nodes), fits):
        yield _match(view, write, operands, (*nodes, *tail.nodes), tail.output, tail.external, tail.expression)


def _match(view: RegionView, write: StateWrite, operands: Operands, nodes: tuple[str, ...], out: str, aux: tuple[str, ...] = (),
           expression: Expression | None = None) -> Match:
    reads = [view.read(name, value) for name, value in operands.values.items()]
    reads += [view.read(f"aux{i}", value) for i, value in enumerate(aux)]
    return Match(kind=RECURRENCE_STEP, label=RECURRENCE_STEP, nodes=view.deps.members(view.deps.mask(nodes)),
                 operands=(view.state("state", write.state), *reads, view.write("out", out)),
                 attributes=tuple(dict(operands.attributes).items()), epilogue=expression)
