"""RMS and layer norms: alone, with the residual addition before them, with what is computed behind them, and two beside each other."""

import math
from collections.abc import Iterable, Iterator
from itertools import permutations

from attrs import frozen

from agentcompile_core.plugin_api import (
    KERNEL_TYPES,
    NORM,
    Argument,
    DType,
    Expression,
    Graph,
    Match,
    Node,
    Operand,
    Ref,
    RegionRule,
    RegionView,
    Scalar,
    SemanticLabel,
    Target,
    argument,
    is_contiguous,
    operator_names,
    packed,
    ref,
)

from . import normed_kinds
from .channel_norm import channel_norms
from .tails import tails

ATEN = ("aten.layer_norm.default", "aten.rms_norm.default")
ADDITIONS = ("aten.add.Tensor", "aten.add.Scalar")


@frozen(kw_only=True)
class NormNode:
    """A norm over the last axis; ``weight`` and ``bias`` are empty where it has none."""

    node: Node
    x: str
    weight: str
    bias: str
    kind: str  # rms, rms_one_plus, rms_once, layer, layer_one_plus
    eps: float
    rows: int
    columns: int
    addition: str = ""  # the node that adds 1 to the weight, for this norm alone

    @property
    def out(self) -> str:
        """The value it makes."""
        return self.node.outputs[0]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that it consists of."""
        return (self.node.name, *((self.addition,) if self.addition else ()))


def norm_of(view: RegionView, node: Node, *, alone: bool = False) -> NormNode | None:
    """The norm of a node over its last axis, if its operands are contiguous and its rows of one kernel type.

    ``alone``: what only a kernel of its own serves as well: norms over several axes, and layer norms that multiply with 1 + weight.

    Its weight and bias have one type, which differs from that of the rows only where nothing is rounded between the two.
    """
    called = _called(view, node)
    if called is None:
        return None
    kind, x, weight, bias, eps = called
    if x is None or not isinstance(eps, int | float) or len(node.outputs) != 1:
        return None
    plus = _one_plus(view, node, weight) if alone and kind == "layer" else None
    if plus is not None:
        kind, weight = "layer_one_plus", plus[0]
    spec = view.graph.spec(x)
    columns = _columns(node, spec.shape)
    if spec.shape and columns != spec.shape[-1] and not alone:
        return None
    if not columns or spec.dtype not in KERNEL_TYPES or not is_contiguous(spec):
        return None
    if any(given is not None and not view.is_weight(given, columns) for given in (weight, bias)):
        return None
    given = {view.graph.spec(value).dtype for value in (ref(weight), ref(bias)) if value is not None}
    if view.graph.spec(node.outputs[0]).dtype is not spec.dtype or len(given) > 1 or not given <= set(KERNEL_TYPES):
        return None
    if given - {spec.dtype} and (kind == "rms" or node.op in ATEN):
        return None
    return NormNode(node=node, x=x, weight=ref(weight) or "", bias=ref(bias) or "", kind=kind, eps=float(eps),
                    rows=spec.numel // columns, columns=columns, addition=plus[1] if plus is not None else "")


def _columns(node: Node, shape: tuple[int, ...]) -> int:
    """Elements that are normalized together: of the last axis, or of those that the call names."""
    named = argument(node, "normalized_shape") if node.op in ATEN else None
    axes = len(named) if isinstance(named, tuple) and named else 1
    return math.prod(shape[len(shape) - axes:]) if shape else 0


def _one_plus(view: RegionView, norm: Node, given: Argument) -> tuple[Ref, str] | None:
    """The weight to which a node adds 1 for a norm alone, as in Nemotron, and that node; the sum is rounded to the type of the weight."""
    made = ref(given)
    add = view.producer(made) if made is not None else None
    if add is None or made is None or add.op not in ADDITIONS or argument(add, "alpha") != 1 or not view.only_used_by(made, {norm.name}):
        return None
    for weight, one in permutations((argument(add, "self"), argument(add, "other"))):
        if isinstance(weight, Ref) and type(one) in (int, float) and one == 1 and view.is_weight(weight):
            spec, total = view.graph.spec(weight.value), view.graph.spec(made)
            return (weight, add.name) if (spec.shape, spec.dtype) == (total.shape, total.dtype) else None
    return None


_Called = tuple[str, str | None, Argument, Argument, Argument]


def _called(view: RegionView, node: Node) -> _Called | None:
    """Kind, operand, weight, bias and eps of a call of an operator that is a norm."""
    if node.op == operator_names.RMS_NORM:
        kind = "rms_one_plus" if argument(node, "one_plus") else "rms_once" if argument(node, "once") else "rms"
        return kind, ref(argument(node, "x")), argument(node, "weight"), None, argument(node, "eps")
    if node.op == operator_names.LAYER_NORM:
        return "layer", ref(argument(node, "x")), argument(node, "weight"), None, argument(node, "eps")
    if node.op not in ATEN:
        return None
    x = ref(argument(node, "input"))
    if node.op == "aten.layer_norm.default":
        return "layer", x, argument(node, "weight"), argument(node, "bias"), argument(node, "eps")
    # torch rounds once, HuggingFace's norms twice where there is a weight: in float32 that is the same.
    twice = argument(node, "weight") is None or (x is not None and view.graph.spec(x).dtype is DType.F32)
    return "rms" if twice else "rms_once", x, argument(node, "weight"), None, argument(node, "eps")


class NormRule(RegionRule):
    """``norm`` matches: every norm, also with what is behind it; those over the last axes with what is before them and beside them."""

    name = "norm"
    version = 7
    kinds = (normed_kinds.NORM,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Norms alone, with their residual, with growing tails, then two of a kind."""
        view = RegionView(graph=graph)
        found: list[Match] = []
        norms = [norm for node in graph.nodes if (norm := norm_of(view, node, alone=True)) is not None]
        for norm in norms:
            before = [_Before(reads=(view.read("x", norm.x),)), *_residual(view, norm)]
            found += [_match(view, norm, one, (), norm.out, (), None) for one in before]
            found += [_match(view, norm, one, *tail) for one in before for tail in tails(view, norm.node)]
        return [*found, *_beside(view, norms), *channel_norms(view)]


@frozen(kw_only=True)
class _Before:
    """What a norm reads, and what is taken in before it."""

    nodes: tuple[str, ...] = ()
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...] = ()
    label: SemanticLabel = SemanticLabel.NORM


def _residual(view: RegionView, norm: NormNode) -> Iterator[_Before]:
    add = view.producer(norm.x)
    if add is None or add.op != "aten.add.Tensor" or argument(add, "alpha") != 1 or len(add.inputs) != 2:
        return
    specs = [packed(view.graph.spec(value)) for value in add.inputs]
    if any(spec != packed(view.graph.spec(norm.x)) for spec in specs):
        return
    x, residual = add.inputs
    shared = not view.only_used_by(norm.x, {norm.node.name})
    yield _Before(nodes=(add.name,), reads=(view.read("x", x), view.read("residual", residual)),
                  writes=(view.write("residual_out", norm.x),) if shared else (), label=SemanticLabel.RESIDUAL_NORM)


def _match(view: RegionView, norm: NormNode, before: _Before, behind: tuple[str, ...], out: str, aux: tuple[str, ...],
           expression: Expression | None) -> Match:
    others = [view.read(f"aux{i}", value) for i, value in enumerate(aux)]
    nodes = (*before.nodes, *norm.nodes, *behind)
    return Match(
        kind=NORM, label=before.label, nodes=view.deps.members(view.deps.mask(nodes)),
        operands=(*before.reads, *_parameters(view, norm), *others, view.write("out", out), *before.writes),
        attributes=_attributes(norm), epilogue=expression,
    )


def _parameters(view: RegionView, norm: NormNode) -> list[Operand]:
    return [view.read(name, value) for name, value in (("weight", norm.weight), ("bias", norm.bias)) if value]


def _attributes(norm: NormNode) -> tuple[tuple[str, Scalar], ...]:
    return ("rows", norm.rows), ("columns", norm.columns), ("norm", norm.kind), ("norm_eps", norm.eps)


def _beside(view: RegionView, norms: list[NormNode]) -> Iterator[Match]:
    """Each norm without a bias with the next one of its kind and types that depends on it in nothing, nor it on that."""
    for index, one in enumerate(norms):
        other = next((other for other in norms[index + 1:] if _alike(view, one, other) and _apart(view, one, other)), None)
        if other is None:
            continue
        weights = [view.read(f"weight{where}", norm.weight) for where, norm in (("", one), ("_beside", other)) if norm.weight]
        yield Match(
            kind=NORM, label=SemanticLabel.NORM, nodes=view.deps.members(view.deps.mask((*one.nodes, *other.nodes))),
            operands=(view.read("x", one.x), view.read("x_beside", other.x), *weights, view.write("out", one.out),
                      view.write("out_beside", other.out)),
            attributes=(*_attributes(one), ("rows_beside", other.rows), ("columns_beside", other.columns)),
        )


def _alike(view: RegionView, one: NormNode, other: NormNode) -> bool:
    dtypes = {tuple(view.graph.spec(value).dtype for value in (norm.x, norm.weight or norm.x)) for norm in (one, other)}
    return (one.kind, one.eps) == (other.kind, other.eps) and not (one.bias or other.bias) and len(dtypes) == 1 and one.x != other.x \
        and bool(one.weight) == bool(other.weight)


def _apart(view: RegionView, one: NormNode, other: NormNode) -> bool:
    """Whether neither depends on the other; ``one`` comes first."""
    return not view.deps.descendants_of(view.deps.mask((one.node.name,))) & view.deps.mask((other.node.name,))
