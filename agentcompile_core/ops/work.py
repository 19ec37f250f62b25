"""How much arithmetic the operators of a graph do, by their normalized kinds: right for any match, whoever proposed it."""

import math
from collections.abc import Iterable

from ..ir.graph import Argument, Graph, Node
from .aliasing import is_alias
from .schema import named

_FREE = frozenset({
    "view", "cast", "copy", "clone", "contiguous", "cat", "stack", "embedding", "index", "index_select", "gather", "take_along_dim",
    "scatter", "index_put", "index_copy", "slice", "select", "narrow", "split", "chunk", "expand", "permute", "transpose", "flip", "roll",
    "repeat", "pad", "constant_pad_nd", "zeros", "ones", "full", "empty", "arange", "fill", "zeros_like", "ones_like", "full_like",
    "advance", "start_decode", "lift_fresh_copy", "detach", "alias",
})
_PER_RESULT = {"rms_norm": 4, "layer_norm": 4, "rope": 3, "rotary_embedding": 2, "softmax": 4, "_softmax": 4, "log_softmax": 4}
_CONTRACTING = {"linear": 0, "mm": 0, "matmul": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1,
                "expert_linear": 0}  # which operand is contracted
_BIASED = {"linear": 2, "expert_linear": 3}  # operands without a bias
_REDUCING = frozenset({
    "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "cumsum", "cumprod", "cummax", "cummin", "logsumexp", "var",
    "std", "norm", "any", "all", "logcumsumexp",
})
_OF_STATE = 6  # of each element of the state of a recurrence for every token: decay, product, sum, product, sum and its share of the rest
_ATTENTION = ("attention", "scaled_dot_product_attention")
_LAST_AXIS = frozenset({"rms_norm", "layer_norm", "recurrence", *_CONTRACTING, *_ATTENTION})
_ALONG = frozenset({"softmax", "_softmax", "log_softmax", *_REDUCING})


def flops_of(nodes: Iterable[Node], graph: Graph) -> int:
    """Floating point operations of ``nodes``: a multiply-add is two, a pointwise operation one, moving data none."""
    return sum(_flops(node, graph) for node in nodes if not is_alias(graph, node))


def _flops(node: Node, graph: Graph) -> int:
    given = [graph.spec(name) for name in node.inputs]
    results = sum(graph.spec(name).numel for name in node.outputs)
    kind = node.kind
    if kind in _FREE or not node.outputs:
        return 0
    if kind in _CONTRACTING and len(given) > _CONTRACTING[kind]:
        added = results if kind in ("addmm", "baddbmm") or len(given) > _BIASED.get(kind, len(given)) else 0
        return 2 * results * (given[_CONTRACTING[kind]].shape or (1,))[-1] + added
    if kind == "convolution" and len(given) > 1:
        return 2 * results * math.prod(given[1].shape[1:])
    if kind in ("recurrence", "causal_convolution"):
        out, last = (graph.spec(name) for name in node.outputs)
        return _OF_STATE * last.numel * out.shape[1] if kind == "recurrence" else 2 * out.numel * last.shape[-1]
    if kind in _ATTENTION and len(given) > 1:
        keys = given[3].shape[1] if kind == "attention" and len(given) > 3 else given[1].shape[-2]
        return 4 * given[0].numel * keys
    if kind in _REDUCING and given:
        return given[0].numel
    return results * _PER_RESULT.get(kind, 1)


def reduction_axis_of(nodes: Iterable[Node], graph: Graph) -> int:
    """The axis that the first reducing operator of ``nodes`` reduces, counted from the end (-1: the last); 0 where none does."""
    for node in nodes:
        if node.kind in _LAST_AXIS:
            return -1
        if node.kind == "convolution":
            return 1 - len(graph.spec(node.inputs[0]).shape)
        if node.kind in _ALONG and node.inputs:
            return _from_the_end(named(node.op, node.args, dict(node.kwargs)).get("dim"), len(graph.spec(node.inputs[0]).shape))
    return 0


def _from_the_end(dim: Argument, rank: int) -> int:
    first = dim[-1] if isinstance(dim, tuple) and dim else dim
    if not isinstance(first, int) or isinstance(first, bool):
        return -1  # all elements
    return first if first < 0 else first - rank
