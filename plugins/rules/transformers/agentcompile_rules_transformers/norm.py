"""RMS and layer norms, alone and with the residual addition before them."""

import math
from collections.abc import Iterable, Iterator

from attrs import frozen

from agentcompile_core.plugin_api import (
    KERNEL_TYPES,
    NORM,
    Argument,
    DType,
    Graph,
    Match,
    Node,
    Operand,
    RegionRule,
    RegionView,
    SemanticLabel,
    Target,
    argument,
    is_contiguous,
    packed,
    ref,
)

from . import kinds
from .channel_norm import channel_norms

ATEN = ("aten.layer_norm.default", "aten.rms_norm.default")


@frozen(kw_only=True)
class NormNode:
    """A norm over the last axis; ``weight`` and ``bias`` are empty where it has none."""

    node: Node
    x: str
    weight: str
    bias: str
    kind: str  # rms, rms_one_plus, rms_once, layer
    eps: float
    rows: int
    columns: int

    @property
    def out(self) -> str:
        """The value it makes."""
        return self.node.outputs[0]


def norm_of(view: RegionView, node: Node, *, several: bool = False) -> NormNode | None:
    """The norm of a node over its last axis (``several``: or axes), if its operands are contiguous and of one kernel type."""
    called = _called(view, node)
    if called is None:
        return None
    kind, x, weight, bias, eps = called
    if x is None or not isinstance(eps, int | float) or len(node.outputs) != 1:
        return None
    spec = view.graph.spec(x)
    columns = _columns(node, spec.shape)
    if spec.shape and columns != spec.shape[-1] and not several:
        return None
    if not columns or spec.dtype not in KERNEL_TYPES or not is_contiguous(spec):
        return None
    if any(given is not None and not view.is_weight(given, columns) for given in (weight, bias)):
        return None
    if any(view.graph.spec(value).dtype is not spec.dtype for value in (*node.inputs, *node.outputs)):
        return None
    return NormNode(node=node, x=x, weight=ref(weight) or "", bias=ref(bias) or "", kind=kind, eps=float(eps),
                    rows=spec.numel // columns, columns=columns)


def _columns(node: Node, shape: tuple[int, ...]) -> int:
    """Elements that are normalized together: of the last axis, or of those that the call names."""
    named = argument(node, "normalized_shape") if node.op in ATEN else None
    axes = len(named) if isinstance(named, tuple) and named else 1
    return math.prod(shape[len(shape) - axes:]) if shape else 0


_Called = tuple[str, str | None, Argument, Argument, Argument]


def _called(view: RegionView, node: Node) -> _Called | None:
    """Kind, operand, weight, bias and eps of a call of an operator that is a norm."""
    if node.op == "agentcompile.rms_norm.default":
        kind = "rms_one_plus" if argument(node, "one_plus") else "rms"
        return kind, ref(argument(node, "x")), argument(node, "weight"), None, argument(node, "eps")
    if node.op == "agentcompile.layer_norm.default":
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
    """``norm`` matches: every norm, those over the last axes also with the addition of two full tensors before them."""

    name = "norm"
    version = 4
    kinds = (kinds.NORM,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Norms alone, then with their residual."""
        view = RegionView(graph=graph)
        found: list[Match] = []
        for node in graph.nodes:
            norm = norm_of(view, node, several=True)
            if norm is not None:
                found.append(_match(view, norm, (), (view.read("x", norm.x),), (), SemanticLabel.NORM))
                found += _residual(view, norm)
        return [*found, *channel_norms(view)]


def _residual(view: RegionView, norm: NormNode) -> Iterator[Match]:
    add = view.producer(norm.x)
    if add is None or add.op != "aten.add.Tensor" or argument(add, "alpha") != 1 or len(add.inputs) != 2:
        return
    specs = [packed(view.graph.spec(value)) for value in add.inputs]
    if any(spec != packed(view.graph.spec(norm.x)) for spec in specs):
        return
    x, residual = add.inputs
    shared = not view.only_used_by(norm.x, {norm.node.name})
    yield _match(view, norm, (add.name,), (view.read("x", x), view.read("residual", residual)),
                 (view.write("residual_out", norm.x),) if shared else (), SemanticLabel.RESIDUAL_NORM)


def _match(view: RegionView, norm: NormNode, before: tuple[str, ...], reads: tuple[Operand, ...], writes: tuple[Operand, ...],
           label: SemanticLabel) -> Match:
    parameters = [view.read(name, value) for name, value in (("weight", norm.weight), ("bias", norm.bias)) if value]
    return Match(
        kind=NORM, label=label, nodes=(*before, norm.node.name),
        operands=(*reads, *parameters, view.write("out", norm.out), *writes),
        attributes=(("rows", norm.rows), ("columns", norm.columns), ("norm", norm.kind), ("norm_eps", norm.eps)),
    )
