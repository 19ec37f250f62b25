"""Norms of images and signals [N, C, ..]: group norm and instance norm are layer norms of rows; batch norm is pointwise by channel."""

import math
from collections.abc import Iterator

from attrs import frozen

from agentcompile_core.plugin_api import (
    KERNEL_TYPES,
    NORM,
    Argument,
    Expression,
    Match,
    Node,
    Operation,
    PointwiseKind,
    RegionView,
    SemanticLabel,
    argument,
    is_contiguous,
    ref,
)

from .tails import tails


@frozen(kw_only=True)
class ChannelNorm:
    """A norm whose rows are ``groups`` groups of channels of each sample; a weight is that of ``span`` neighbours."""

    x: str
    weight: str
    bias: str
    eps: float
    rows: int
    columns: int
    groups: int
    span: int


def channel_norms(view: RegionView) -> Iterator[Match]:
    """``norm`` matches of every group norm, and of every instance norm by the statistics of its input, alone and with growing tails."""
    for node in view.graph.nodes:
        found = _norm_of(view, node)
        if found is not None:
            yield _match(view, node, found, (), node.outputs[0], (), None)
            yield from (_match(view, node, found, *tail) for tail in tails(view, node))


def _norm_of(view: RegionView, node: Node) -> ChannelNorm | None:
    x = ref(argument(node, "input")) if node.op in ("aten.group_norm.default", "aten.instance_norm.default") else None
    eps = argument(node, "eps") if x is not None else None
    if x is None or not isinstance(eps, int | float):
        return None
    spec = view.graph.spec(x)
    shape = spec.shape
    if len(shape) < 2 or not spec.numel or not is_contiguous(spec) or not is_contiguous(view.graph.spec(node.outputs[0])):
        return None
    groups = argument(node, "num_groups") if node.op == "aten.group_norm.default" else _instances(node, shape[1])
    parameters = [argument(node, name) for name in ("weight", "bias")]
    if not isinstance(groups, int) or not _parameters_fit(view, node, parameters, shape[1]):
        return None
    rows = shape[0] * groups
    return ChannelNorm(x=x, weight=ref(parameters[0]) or "", bias=ref(parameters[1]) or "", eps=float(eps), rows=rows,
                       columns=spec.numel // rows, groups=groups, span=math.prod(shape[2:]))


def _instances(node: Node, channels: int) -> int | None:
    """A group per channel; None where statistics are given and not made."""
    return channels if argument(node, "use_input_stats") is True and argument(node, "running_mean") is None else None


def _parameters_fit(view: RegionView, node: Node, given: list[Argument], channels: int) -> bool:
    """Weights of one element per channel, and one kernel type for all."""
    fit = all(value is None or view.is_weight(value, channels) for value in given)
    types = {view.graph.spec(value).dtype for value in (*node.inputs, *node.outputs)}
    return fit and len(types) == 1 and types <= set(KERNEL_TYPES)


def _match(view: RegionView, node: Node, norm: ChannelNorm, behind: tuple[str, ...], out: str, aux: tuple[str, ...],
           expression: Expression | None) -> Match:
    parameters = [view.read(name, value) for name, value in (("weight", norm.weight), ("bias", norm.bias)) if value]
    others = [view.read(f"aux{i}", value) for i, value in enumerate(aux)]
    return Match(
        kind=NORM, label=SemanticLabel.NORM, nodes=view.deps.members(view.deps.mask((node.name, *behind))),
        operands=(view.read("x", norm.x), *parameters, *others, view.write("out", out)),
        attributes=(("rows", norm.rows), ("columns", norm.columns), ("norm", "layer"), ("norm_eps", norm.eps),
                    *((("groups", norm.groups), ("span", norm.span)) if parameters else ())),
        epilogue=expression)


def batch_norm_of(view: RegionView, node: Node) -> tuple[tuple[str, ...], Expression] | None:
    """What a batch norm at inference reads, x first, and what it computes of it: by given statistics, one of each per channel."""
    if node.op != "aten.batch_norm.default" or argument(node, "training") is not False:
        return None
    names = [ref(argument(node, name)) for name in ("input", "running_mean", "running_var", "weight", "bias")]
    x, mean, variance, *_ = names
    eps = argument(node, "eps")
    if x is None or mean is None or variance is None or not isinstance(eps, int | float):
        return None
    spec = view.graph.spec(x)
    values = tuple(dict.fromkeys(name for name in names if name is not None))
    specs = [view.graph.spec(value) for value in (*values, node.outputs[0])]
    if len(spec.shape) < 2 or any(each.dtype not in KERNEL_TYPES or not is_contiguous(each) for each in specs):
        return None
    return values, _by_channel({name: f"in{i}" for i, name in enumerate(values)}, names, float(eps))


def _by_channel(called: dict[str, str], names: list[str | None], eps: float) -> Expression:
    """((x - mean) * rsqrt(variance + eps)) * weight + bias."""
    x, mean, variance, weight, bias = (called[name] if name is not None else None for name in names)
    assert x is not None and mean is not None and variance is not None
    kind = PointwiseKind
    operations = [Operation(kind.SUB, (x, mean)), Operation(kind.ADD, (variance, eps)), Operation(kind.RSQRT, (1,)),
                  Operation(kind.MUL, (0, 2))]
    if weight is not None:
        operations.append(Operation(kind.MUL, (len(operations) - 1, weight)))
    if bias is not None:
        operations.append(Operation(kind.ADD, (len(operations) - 1, bias)))
    return Expression(arguments=tuple(called.values()), operations=tuple(operations))


def rooted(match: Match) -> frozenset[str]:
    """Inputs of an expression of which an inverse root is taken, with at most a number added before it."""
    operations = match.epilogue.operations if match.epilogue is not None else ()
    found: set[str] = set()
    for operation in operations:
        under = operation.operands[0] if operation.kind is PointwiseKind.RSQRT else None
        if type(under) is int:
            found.update(each for each in operations[under].operands if isinstance(each, str))
        elif isinstance(under, str):
            found.add(under)
    return frozenset(found)
