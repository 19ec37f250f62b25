"""One rule per operator overload: Bounded operands in, Bounded results out. What an overload is not listed for, it has no rule for.

Arguments are read by their names in the operator's schema (``Call``), so a rule sees what the framework sees, however the
call was written. A rule that does not account for an argument refuses the call.
"""

import math
from collections.abc import Callable, Iterable

import torch

from ...errors import AgentCompileError
from ...ir.graph import DType
from ..dtypes import torch_dtype
from ..operator_names import (
    ADVANCE,
    ARGMAX,
    ATTENTION,
    CONVOLUTION,
    COPY,
    EXPERT_LINEAR,
    LAYER_NORM,
    RECURRENCE,
    RMS_NORM,
    ROPE,
    ROTARY,
    START_DECODE,
)
from . import along_axes, classes, losses, norms, piecewise, pointwise, pools, recurrences, reductions, scans
from .attention import Attending, append, attention, masked_attention
from .bounded import Bounded, exact, rounded
from .calls import Call, values_in
from .choice import gather, topk
from .experts import expert_linear

Rule = Callable[[Call], tuple[Bounded, ...]]


def apply(call: Call) -> tuple[Bounded, ...]:
    """The results of one node before they are rounded to their element types.

    Raises:
        AgentCompileError: there is no rule for the operator, or none for these arguments.
    """
    rule = _RULES.get(call.node.op)
    if rule is None:
        raise AgentCompileError(f"the reference has no error rule for {call.node.op}; regions with it stay on the framework")
    return rule(call)


def _refuse(call: Call, what: str) -> AgentCompileError:
    return AgentCompileError(f"the reference has no error rule for {call.node.op} with {what}; regions with it stay on the framework")


def _check_dtype(call: Call, x: Bounded) -> None:
    """Refuse a ``dtype`` argument that would change the operand before it is used (a cast to a narrower or another kind of type)."""
    operand = call.graph.spec(call.node.inputs[0]).dtype
    if call["dtype"] is not None and (not call.dtype.is_float or call.dtype.bytes < operand.bytes or not x.value.is_floating_point()):
        raise _refuse(call, f"dtype {call.dtype.value} of {operand.value}")


def _reshape(call: Call) -> tuple[Bounded, ...]:
    shape = call["size"] if "size" in call.arguments else call["shape"]
    x = call.bounded("self")
    return (Bounded(x.value.reshape(shape), x.error.reshape(shape)),)


def _view(call: Call) -> tuple[Bounded, ...]:
    first = next(iter(call.arguments))
    x = call.bounded(first)
    rest = {name: values_in(given) for name, given in call.arguments.items()}
    values, errors = call.run(rest), call.run(rest | {first: x.error})
    if isinstance(values, torch.Tensor):
        return (Bounded(values, errors),)
    return tuple(Bounded(v, e) for v, e in zip(values, errors, strict=True))


def _masked_fill(call: Call) -> tuple[Bounded, ...]:
    x, fill = call.bounded("self"), pointwise.bounded(call["value"], call.bounded("self").value)
    return (pointwise.where(call.bounded("mask"), Bounded(fill.value.to(x.value.dtype), fill.error), x),)


def _cat(call: Call) -> tuple[Bounded, ...]:
    parts, dim = call["tensors"], call["dim"]
    return (Bounded(torch.cat([x.value for x in parts], dim), torch.cat([x.error for x in parts], dim)),)


def _cast(call: Call) -> tuple[Bounded, ...]:
    x = call.bounded("self")
    if call.dtype.is_float:
        return (Bounded(x.value.double(), x.error),)
    value = x.value.to(torch_dtype(call.dtype))
    # What is cut off may be a whole number more or less.
    return (Bounded(value, torch.where(x.error > 0, x.error + 1.0, x.error)),)


def _unary(name: str) -> Rule:
    def rule(call: Call) -> tuple[Bounded, ...]:
        x = call.bounded("self")
        if not call.dtype.is_float:
            return _exactly(call)
        return (pointwise.unary(name, Bounded(x.value.double(), x.error), dtype=call.dtype),)

    return rule


def _gelu(call: Call) -> tuple[Bounded, ...]:
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    if call["approximate"] not in names:
        raise _refuse(call, f"approximate={call['approximate']!r}")
    return (pointwise.unary(names[call["approximate"]], call.bounded("self")),)


def _binary(rule: Callable[[Call, Bounded, Bounded], Bounded]) -> Rule:
    """A rule over ``self`` and ``other`` as float64, either of which may be a number; integers in, integers out: as they are."""
    def apply_to(call: Call) -> tuple[Bounded, ...]:
        if not call.dtype.is_float:
            return _exactly(call)
        like = call.values[0].value
        a, b = (pointwise.bounded(call[name], like, call.dtype) for name in ("self", "other"))
        return (rule(call, Bounded(a.value.double(), a.error), Bounded(b.value.double(), b.error)),)

    return apply_to


def _div(call: Call, a: Bounded, b: Bounded) -> Bounded:
    if call.arguments.get("rounding_mode") is not None:
        raise _refuse(call, f"rounding_mode={call['rounding_mode']!r}")
    return pointwise.div(a, b)


def _exactly(call: Call) -> tuple[Bounded, ...]:
    """The operator itself on operands that are integers."""
    if any(x.value.is_floating_point() for x in call.values):
        raise _refuse(call, f"a result of type {call.dtype.value}")
    return (exact(call.run({name: values_in(given) for name, given in call.arguments.items()})),)


def _power(call: Call) -> tuple[Bounded, ...]:
    if not call.dtype.is_float:
        return _exactly(call)
    x = call.bounded("self")
    exponent = float(call["exponent"]) if "exponent" in call.arguments else 2.0
    return (pointwise.power(Bounded(x.value.double(), x.error), exponent, call.dtype),)


def _mean(divide: bool) -> Rule:
    def rule(call: Call) -> tuple[Bounded, ...]:
        if not call.dtype.is_float:
            return _exactly(call)
        x = call.bounded("self")
        _check_dtype(call, x)
        dims = call.arguments.get("dim") or list(range(x.value.dim()))
        count = 1
        for dim in dims:
            count *= x.value.shape[dim]
        wide = Bounded(x.value.double(), x.error)
        return (pointwise.mean(wide, dims, bool(call.arguments.get("keepdim", False)), call.length(max(1, count)), divide),)

    return rule


def _linear(call: Call) -> tuple[Bounded, ...]:
    x, weight = call.bounded("input"), call.bounded("weight")
    if weight.value.dim() != 2 or not weight.is_exact:
        raise _refuse(call, "a weight that is no matrix or is computed")
    return (reductions.linear(x, weight.value, call["bias"], call.length(x.value.shape[-1]), weight.read_from),)


def _addmm(call: Call) -> tuple[Bounded, ...]:
    x, weight, bias = call.bounded("mat1"), call.bounded("mat2"), call.bounded("self")
    if not weight.is_exact:
        return (_scaled_sum(call, bias, reductions.matmul(x, weight, call.length(x.value.shape[-1]))),)
    plain = call["alpha"] == 1 and call["beta"] == 1
    product = reductions.linear(x, weight.value.t(), bias if plain else None, call.length(x.value.shape[-1]), weight.read_from)
    return (product if plain else _scaled_sum(call, bias, product),)


def _scaled_sum(call: Call, bias: Bounded, product: Bounded) -> Bounded:
    """beta * bias + alpha * product; a beta of 0 means that the bias is not looked at."""
    scaled = pointwise.mul(product, pointwise.bounded(call["alpha"], product.value, call.dtype))
    return pointwise.add(scaled, bias, float(call["beta"]), call.dtype) if call["beta"] != 0 else scaled


def _baddbmm(call: Call) -> tuple[Bounded, ...]:
    x, y = call.bounded("batch1"), call.bounded("batch2")
    return (_scaled_sum(call, call.bounded("self"), reductions.matmul(x, y, call.length(x.value.shape[-1]))),)


def _einsum(call: Call) -> tuple[Bounded, ...]:
    """Two operands by a written-out equation: sums over the labels that the result lacks."""
    equation, given = str(call["equation"]).replace(" ", ""), call["tensors"]
    sides, arrow, out = equation.partition("->")
    if len(given) != 2 or not arrow or "." in equation:
        raise _refuse(call, f"the equation {equation!r} of {len(given)} operands")
    extents = {label: extent for side, one in zip(sides.split(","), given, strict=True)
               for label, extent in zip(side, one.value.shape, strict=True) if extent != 1}
    depth = math.prod(extent for label, extent in extents.items() if label not in out)
    return (reductions.matmul(given[0], given[1], call.length(depth), lambda x, y: torch.einsum(equation, x, y)),)


def _matmul(first: str, second: str) -> Rule:
    def rule(call: Call) -> tuple[Bounded, ...]:
        a, b = call.bounded(first), call.bounded(second)
        return (reductions.matmul(a, b, call.length(a.value.shape[-1])),)

    return rule


def _embedding(call: Call) -> tuple[Bounded, ...]:
    weight, ids = call.bounded("weight"), call.bounded("indices").value
    return (Bounded(weight.value[ids], weight.error[ids]),)


def _our_rms_norm(call: Call) -> tuple[Bounded, ...]:
    x, one_plus = call.bounded("x"), bool(call["one_plus"])
    inner = None if one_plus or call["once"] or call["weight"] is None else call.graph.spec(call.node.inputs[0]).dtype
    return (reductions.rms_norm(x, call["weight"], float(call["eps"]), one_plus, inner, call.length(x.value.shape[-1])),)


def _our_layer_norm(call: Call) -> tuple[Bounded, ...]:
    x = call.bounded("x")
    return (reductions.layer_norm(x, call["weight"], None, float(call["eps"]), call.length(x.value.shape[-1])),)


def _softmax(rule: Callable[[Bounded, int, int, DType], Bounded]) -> Rule:
    def apply_to(call: Call) -> tuple[Bounded, ...]:
        x, dim = call.bounded("self"), int(call["dim"])
        if "dtype" in call.arguments:
            _check_dtype(call, x)
        return (rule(x, dim, call.length(x.value.shape[dim] if x.value.dim() else 1), call.dtype),)

    return apply_to


def _rope(call: Call) -> tuple[Bounded, ...]:
    return (reductions.rope(call.bounded("x"), call.bounded("cos"), call.bounded("sin"), call.dtype, bool(call["interleaved"])),)


def _rotary(call: Call) -> tuple[Bounded, ...]:
    position, frequencies = call.bounded("position_ids").value, call.bounded("inv_freq")
    return reductions.rotary_table(position, frequencies, float(call["attention_scaling"]), bool(call["interleaved"]))


def _attention(call: Call) -> tuple[Bounded, ...]:
    q, k, v = call.bounded("q"), call.bounded("k"), call.bounded("v")
    start = 0 if call["fresh"] else int(call.bounded("position").value)
    k_name, v_name = call.node.mutates[:2] if len(call.node.mutates) >= 2 else call.node.inputs[3:5]
    call.env[k_name] = keys = append(call.bounded("k_cache"), k, start)
    call.env[v_name] = values = append(call.bounded("v_cache"), v, start)
    depth = call.length(max(q.value.shape[-1], start + q.value.shape[2]))
    how = Attending(position=start, scale=float(call["scale"]), window=int(call["window"]), softcap=float(call["softcap"]),
                    slopes=tuple(call["slopes"] or ()), chunk=int(call["chunk"]), dtype=call.dtype, depth=depth)
    return (attention(q, keys, values, call["sinks"], how),)


def _masked_attention(call: Call) -> tuple[Bounded, ...]:
    q, k, v, mask = call.bounded("query"), call.bounded("key"), call.bounded("value"), call.arguments.get("attn_mask")
    if q.value.dim() != 4 or call["dropout_p"] != 0.0 or (mask is not None and (not mask.is_exact or call["is_causal"])):
        raise _refuse(call, "other than four axes, dropout, or a mask that is computed")
    scale = float(q.value.shape[-1]) ** -0.5 if call["scale"] is None else float(call["scale"])
    how = Attending(position=0, scale=scale, dtype=call.dtype, depth=call.length(max(q.value.shape[-1], k.value.shape[2])))
    return (masked_attention(q, k, v, mask.value if mask is not None else None, bool(call["is_causal"]), how),)


def _argmax(call: Call) -> tuple[Bounded, ...]:
    found = reductions.argmax(call.bounded("logits"))
    shape = call.graph.spec(call.node.outputs[0]).shape
    return (Bounded(found.value.reshape(shape), found.error.reshape(shape), found.choices),)


def _as_they_are(call: Call) -> tuple[Bounded, ...]:
    """Operators that make or compare numbers: run in float64. What they write in place goes back into the environment."""
    mutated = {name: call.env[name].value.clone() for name in call.node.mutates}
    copies = {id(call.env[name]): value for name, value in mutated.items()}
    given = {name: copies.get(id(x), values_in(x)) for name, x in call.arguments.items()}
    result = call.run(given)
    for name, value in mutated.items():
        call.env[name] = exact(value)
    return (exact(result),) if call.node.outputs else ()


def _copy(call: Call) -> tuple[Bounded, ...]:
    """What is written over a value of the environment, as that stores it; one that the graph is given, of which nothing is a view yet."""
    written = call.node.mutates[0]
    if written in call.graph.producer:
        raise _refuse(call, "a view to write to")
    spec, src = call.graph.spec(written), call.bounded("src")
    call.env[written] = rounded(src.value.expand(spec.shape), src.error.expand(spec.shape), spec.dtype)
    return (call.env[written],) if call.node.outputs else ()


def _overloads(names: Iterable[str], *overloads: str) -> tuple[str, ...]:
    return tuple(f"aten.{name}.{overload}" for name in names for overload in overloads)


_VIEWS = (
    *_overloads(("t", "clone", "contiguous", "alias", "detach", "permute", "unsqueeze", "expand", "narrow", "split_with_sizes", "chunk",
                 "index_select", "repeat", "swapaxes", "flip", "lift_fresh_copy"), "default"),
    *_overloads(("select", "transpose", "unbind", "movedim", "unflatten"), "int"),
    *_overloads(("squeeze",), "default", "dim", "dims"),
    "aten.slice.Tensor", "aten.split.Tensor", "aten.split.sizes", "aten.flatten.using_ints", "aten.movedim.intlist",
)
_RESHAPES = _overloads(("view", "_unsafe_view", "reshape"), "default")
_JOINS = ("aten.cat.default", "aten.concat.default")
MOVES = frozenset((*_VIEWS, *_RESHAPES, *_JOINS))  # operators that only move values
_FUNCTIONS = (
    "silu", "sigmoid", "tanh", "relu", "neg", "exp", "rsqrt", "sqrt", "cos", "sin", "abs", "reciprocal", "log", "log1p", "expm1", "erf",
    "mish", "log_sigmoid", "hardswish", "hardsigmoid",
)
_MAKERS = (
    *_overloads(("full", "zeros", "ones", "scalar_tensor", "arange"), "default"), "aten.arange.start", "aten.arange.start_step",
    "aten.logical_and.default", "aten.bitwise_and.Tensor", "aten.bitwise_and.Scalar",
    ADVANCE, START_DECODE,
)
_RULES: dict[str, Rule] = {
    **piecewise.RULES,
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(_overloads(("masked_fill",), "Scalar", "Tensor"), _masked_fill),
    **{f"aten.{name}.default": _unary(name) for name in _FUNCTIONS},
    **dict.fromkeys((*_overloads(("to",), "dtype", "dtype_layout", "device", "other"), "aten._to_copy.default", "aten.type_as.default"),
                    _cast),
    **dict.fromkeys(_MAKERS, _as_they_are),
    **dict.fromkeys(_overloads(("add",), "Tensor", "Scalar"), _binary(lambda c, a, b: pointwise.add(a, b, float(c["alpha"]), c.dtype))),
    **dict.fromkeys(_overloads(("sub",), "Tensor", "Scalar"), _binary(lambda c, a, b: pointwise.add(a, b, -float(c["alpha"]), c.dtype))),
    **dict.fromkeys(_overloads(("rsub",), "Tensor", "Scalar"), _binary(lambda c, a, b: pointwise.add(b, a, -float(c["alpha"]), c.dtype))),
    **dict.fromkeys(_overloads(("mul", "multiply"), "Tensor", "Scalar"), _binary(lambda c, a, b: pointwise.mul(a, b, c.dtype))),
    **dict.fromkeys(_overloads(("div", "divide"), "Tensor", "Scalar", "Tensor_mode", "Scalar_mode"), _binary(_div)),
    **dict.fromkeys(("aten.pow.Tensor_Scalar", "aten.square.default"), _power),
    **dict.fromkeys(("aten.mean.default", "aten.mean.dim"), _mean(True)),
    **dict.fromkeys(("aten.sum.default", "aten.sum.dim_IntList"), _mean(False)),
    **dict.fromkeys(("aten.softmax.int", "aten._softmax.default"), _softmax(reductions.softmax)),
    **dict.fromkeys(("aten.log_softmax.int", "aten._log_softmax.default"), _softmax(reductions.log_softmax)),
    "aten.matmul.default": _matmul("self", "other"), **dict.fromkeys(("aten.bmm.default", "aten.mm.default"), _matmul("self", "mat2")),
    **dict.fromkeys(_JOINS, _cat),
    **along_axes.RULES, **norms.RULES, **losses.RULES, **pools.RULES,
    "aten.gelu.default": _gelu, "aten.linear.default": _linear, "aten.addmm.default": _addmm,
    "aten.baddbmm.default": _baddbmm, "aten.einsum.default": _einsum, "aten.embedding.default": _embedding,
    RMS_NORM: _our_rms_norm,
    LAYER_NORM: _our_layer_norm,
    ROPE: _rope, ROTARY: _rotary, ATTENTION: _attention,
    "aten.scaled_dot_product_attention.default": _masked_attention,
    ARGMAX: _argmax, EXPERT_LINEAR: expert_linear, "aten.topk.default": topk,
    "aten.gather.default": gather, "aten.cumsum.default": scans.cumsum, "aten.cumprod.default": scans.cumprod,
    "aten.cross_entropy_loss.default": classes.cross_entropy, COPY: _copy,
    RECURRENCE: recurrences.recurrence,
    CONVOLUTION: recurrences.causal_convolution,
}
