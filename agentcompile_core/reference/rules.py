"""One rule per operator: Bounded operands in, Bounded results out. ``rule_of`` finds it by the exact overload's name."""

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen

from ..errors import AgentCompileError
from ..graph import DType, Graph, Node
from ..interpreter import operator_of
from . import pointwise, reductions
from .attention import append, attention
from .bounded import Bounded, exact

_RESHAPES = ("view", "_unsafe_view", "reshape")
_VIEWS = (
    "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "clone", "contiguous", "alias", "detach",
    "flatten", "unflatten", "narrow", "split", "split_with_sizes", "chunk", "unbind", "index_select", "repeat", "movedim",
    "swapaxes", "lift_fresh_copy", "masked_fill",
)
_UNARY = {
    "silu": "silu", "gelu": "gelu", "sigmoid": "sigmoid", "tanh": "tanh", "relu": "relu", "neg": "neg", "exp": "exp",
    "rsqrt": "rsqrt", "sqrt": "sqrt", "cos": "cos", "sin": "sin", "abs": "abs", "reciprocal": "reciprocal",
}
_CASTS = ("_to_copy", "to", "type_as", "float", "half", "_conj")
_INTEGERS = ("arange", "full", "zeros", "ones", "scalar_tensor", "le", "lt", "ge", "gt", "eq", "ne", "logical_and", "bitwise_and")


@frozen(kw_only=True)
class Call:
    """One node with its arguments resolved: Bounded for values, torch objects for symbols, lists for tuples."""

    graph: Graph
    node: Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    depth: int
    env: dict[str, Bounded]

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload."""
        return self.node.op.split(".")[1]

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """Argument ``index``, or keyword ``name``, or ``default``."""
        if index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, default)

    @property
    def dtype(self) -> DType:
        """Element type of the first output."""
        return self.graph.spec(self.node.outputs[0]).dtype

    def length(self, depth: int) -> int:
        """The reduction depth to charge for an axis of ``depth`` elements."""
        return min(self.depth, depth) if self.depth > 0 else depth


Rule = Callable[[Call], tuple[Bounded, ...]]


def apply(call: Call) -> tuple[Bounded, ...]:
    """The results of one node before they are rounded to their element types.

    Raises:
        AgentCompileError: there is no rule for the operator.
    """
    rule = _RULES.get(call.name)
    if rule is None:
        raise AgentCompileError(f"the reference has no error rule for {call.node.op}; regions with it stay on the framework")
    return rule(call)


def _pick(x: Any, part: str) -> Any:
    if isinstance(x, Bounded):
        return x.value if part == "value" else x.error
    return [_pick(item, part) for item in x] if isinstance(x, list) else x


def _integer(x: Any) -> Any:
    """An index operand: its value, whichever part is being moved."""
    return x.value if isinstance(x, Bounded) and not x.value.is_floating_point() else x


def _view(call: Call) -> tuple[Bounded, ...]:
    if call.name in _RESHAPES:
        shape = call.args[1]
        return (Bounded(call.args[0].value.reshape(shape), call.args[0].error.reshape(shape)),)
    overload = operator_of(call.node.op)
    keep = [call.args[0], *(_integer(a) for a in call.args[1:])]
    kwargs = {k: _integer(v) for k, v in call.kwargs.items()}
    parts = []
    for part in ("value", "error"):
        args = [_pick(a, part) for a in keep]
        if call.name == "masked_fill" and part == "error":
            args[2] = 0.0
        parts.append(overload(*args, **{k: _pick(v, part) for k, v in kwargs.items()}))
    values, errors = parts
    if isinstance(values, torch.Tensor):
        return (Bounded(values, errors),)
    return tuple(Bounded(v, e) for v, e in zip(values, errors, strict=True))


def _cat(call: Call) -> tuple[Bounded, ...]:
    dim = call.argument(1, "dim", 0)
    return (Bounded(torch.cat([x.value for x in call.args[0]], dim), torch.cat([x.error for x in call.args[0]], dim)),)


def _cast(call: Call) -> tuple[Bounded, ...]:
    x = call.args[0]
    dtype = call.graph.spec(call.node.outputs[0]).dtype
    if dtype.is_float:
        return (Bounded(x.value.double(), x.error),)
    return (Bounded(x.value.to(getattr(torch, dtype.value)), x.error),)


def _unary(call: Call) -> tuple[Bounded, ...]:
    name = _UNARY[call.name]
    if name == "gelu" and call.argument(1, "approximate", "none") == "tanh":
        name = "gelu_tanh"
    x = call.args[0]
    return (pointwise.unary(name, Bounded(x.value.double(), x.error)),)


def _binary(call: Call) -> tuple[Bounded, ...]:
    a, b = call.args[0], call.args[1]
    like = a.value if isinstance(a, Bounded) else b.value
    a, b = pointwise.bounded(a, like), pointwise.bounded(b, like)
    if not (a.value.is_floating_point() or b.value.is_floating_point()):
        args = [_pick(x, "value") for x in call.args]
        value = operator_of(call.node.op)(*args, **call.kwargs)
        return (Bounded(value, torch.zeros(value.shape, dtype=torch.float64, device=value.device)),)
    alpha = float(call.kwargs.get("alpha", 1.0))
    if call.name == "rsub":
        return (pointwise.add(b, a, -alpha),)
    rules: dict[str, Callable[[], Bounded]] = {
        "add": lambda: pointwise.add(a, b, alpha), "sub": lambda: pointwise.add(a, b, -alpha),
        "mul": lambda: pointwise.mul(a, b), "div": lambda: pointwise.div(a, b),
    }
    return (rules[call.name.rstrip("_")](),)


def _power(call: Call) -> tuple[Bounded, ...]:
    return (pointwise.power(call.args[0], float(call.args[1])),)


def _mean(call: Call) -> tuple[Bounded, ...]:
    x = call.args[0]
    dim = call.argument(1, "dim")
    return (pointwise.mean(x, dim, bool(call.argument(2, "keepdim", False)), call.length(x.value.shape[-1]), call.name == "mean"),)


def _linear(call: Call) -> tuple[Bounded, ...]:
    x, weight = call.args[0], call.args[1]
    return (reductions.linear(x, weight.value, call.argument(2, "bias"), call.length(x.value.shape[-1])),)


def _addmm(call: Call) -> tuple[Bounded, ...]:
    bias, x, weight = call.args[:3]
    return (reductions.linear(x, weight.value.t(), bias, call.length(x.value.shape[-1])),)


def _matmul(call: Call) -> tuple[Bounded, ...]:
    a, b = call.args[:2]
    return (reductions.matmul(a, b, call.length(a.value.shape[-1])),)


def _embedding(call: Call) -> tuple[Bounded, ...]:
    weight, ids = call.args[:2]
    value = weight.value[ids.value]
    return (Bounded(value, torch.zeros_like(value)),)


def _rms_norm(call: Call) -> tuple[Bounded, ...]:
    ours = call.node.op.startswith("agentcompile.")
    x = call.args[0]
    weight = call.args[1] if ours else call.argument(2, "weight")
    eps = call.argument(2, "eps") if ours else call.argument(3, "eps")
    one_plus = bool(call.argument(3, "one_plus", False)) if ours else False
    inner = call.dtype if ours and not one_plus else None
    if eps is None:
        eps = torch.finfo(torch.float32).eps
    return (reductions.rms_norm(x, weight, float(eps), one_plus, inner, call.length(x.value.shape[-1])),)


def _layer_norm(call: Call) -> tuple[Bounded, ...]:
    x = call.args[0]
    if list(call.args[1]) != [x.value.shape[-1]]:
        raise AgentCompileError("the reference knows layer norms over the last axis only")
    depth = call.length(x.value.shape[-1])
    return (reductions.layer_norm(x, call.argument(2, "weight"), call.argument(3, "bias"), float(call.argument(4, "eps", 1e-5)), depth),)


def _softmax(call: Call) -> tuple[Bounded, ...]:
    return (reductions.softmax(call.args[0], int(call.args[1]), call.length(call.args[0].value.shape[-1])),)


def _rope(call: Call) -> tuple[Bounded, ...]:
    x, cos, sin = call.args[:3]
    return (reductions.rope(x, cos, sin, call.dtype),)


def _rotary(call: Call) -> tuple[Bounded, ...]:
    return reductions.rotary_table(call.args[0].value, call.args[1], float(call.args[2]))


def _attention(call: Call) -> tuple[Bounded, ...]:
    q, k, v, keys, values, position = call.args[:6]
    start = int(position.value)
    k_name, v_name = call.node.mutates[:2] if len(call.node.mutates) >= 2 else call.node.inputs[3:5]
    call.env[k_name] = keys = append(keys, k, start)
    call.env[v_name] = values = append(values, v, start)
    window, softcap = int(call.argument(7, "window", 0)), float(call.argument(8, "softcap", 0.0))
    depth = call.depth if call.depth > 0 else max(q.value.shape[-1], start + q.value.shape[2])
    return (attention(q, keys, values, start, float(call.argument(6, "scale")), window, softcap,
                      call.argument(9, "sinks"), call.dtype, depth),)


def _argmax(call: Call) -> tuple[Bounded, ...]:
    found = reductions.argmax(call.args[0])
    shape = call.graph.spec(call.node.outputs[0]).shape
    return (Bounded(found.value.reshape(shape), found.error.reshape(shape), found.choices),)


def _integers(call: Call) -> tuple[Bounded, ...]:
    """Operators on indices and masks: run as they are. What they write in place goes back into the environment."""
    mutated = {name: call.env[name].value.clone() for name in call.node.mutates}
    names = {id(call.env[name]): value for name, value in mutated.items()}
    args = [names.get(id(a), _pick(a, "value")) for a in call.args]
    result = operator_of(call.node.op)(*args, **{k: _pick(v, "value") for k, v in call.kwargs.items()})
    for name, value in mutated.items():
        call.env[name] = exact(value)
    if not call.node.outputs:
        return ()
    return (exact(result),)


_RULES: dict[str, Rule] = {
    **dict.fromkeys((*_RESHAPES, *_VIEWS), _view),
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys(_INTEGERS, _integers),
    **dict.fromkeys(("add", "sub", "mul", "div", "rsub"), _binary),
    **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
    **dict.fromkeys(("mean", "sum"), _mean),
    **dict.fromkeys(("softmax", "_softmax"), _softmax),
    **dict.fromkeys(("advance", "start_decode"), _integers),
    "pow": _power, "cat": _cat, "linear": _linear, "addmm": _addmm, "embedding": _embedding, "rms_norm": _rms_norm,
    "layer_norm": _layer_norm, "rope": _rope, "rotary_embedding": _rotary, "attention": _attention, "argmax": _argmax,
}
