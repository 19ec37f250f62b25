"""Error rules of reductions along axes that are no plain sums: extremes and where they are, products, vector norms, variances."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import AgentCompileError
from ...ir.graph import DType
from ..dtypes import torch_dtype
from . import pointwise
from .bounded import SPREAD, STORED, TAIL, U32, UNIT_ROUNDOFF, Bounded, exact, in_blocks, overflowing
from .calls import Call
from .reductions import scores, total

SMALLEST = 2.0**-149
SMALLEST_NORMAL = -126.0  # as a power of two
LANES = 4.0  # of one-by-one sums of squares: processors have at least so many
RUNNING = 4.0  # roundings of a mean that is carried along
EVEN = 1.6  # as SPREAD, where all roundings count alike
LOGARITHM = 3.0  # roundings of a logarithm, and of its sum with the largest element
FLUSHED_SQUARE = 2.0**-62  # squares of smaller numbers are below what float32 keeps in full
Rule = Callable[[Call], tuple[Bounded, ...]]


def _axes(call: Call, x: Tensor) -> list[int]:
    dim = call.arguments.get("dim")
    if dim is None or dim == []:
        return list(range(x.dim()))
    return [d % max(1, x.dim()) for d in (dim if isinstance(dim, list) else [dim])]


def _keepdim(call: Call) -> bool:
    return bool(call.arguments.get("keepdim", False))


def floats(call: Call, name: str = "self") -> Bounded:
    """The operand, a float; a ``dtype`` that would change it before it is used is refused."""
    x = call.bounded(name)
    operand = call.graph.spec(call.node.inputs[0]).dtype
    narrower = call.arguments.get("dtype") is not None and torch_dtype(call.dtype).itemsize < torch_dtype(operand).itemsize
    if not x.value.is_floating_point() or narrower:
        raise AgentCompileError(f"the reference has no error rule for {call.node.op} of {operand.value} as {call.dtype.value}")
    return x


def _extreme(largest: bool) -> Rule:
    def rule(call: Call) -> tuple[Bounded, ...]:
        x = floats(call)
        pick = torch.amax if largest else torch.amin
        axes, keepdim = _axes(call, x.value), _keepdim(call)
        value = pick(x.value, axes, keepdim)
        if x.is_exact:
            return (exact(value),)
        up, down = (pick(x.value + sign * x.error, axes, keepdim) - value for sign in (1.0, -1.0))
        return (Bounded(value, torch.where(value.isfinite(), torch.maximum(up, -down).nan_to_num(nan=torch.inf), 0.0)),)

    return rule


def _extreme_with_index(call: Call) -> tuple[Bounded, ...]:
    """Value and first index; of computed values nothing can be said about which one is found."""
    x = _exact_operand(call)
    found = call.run({name: given.value if isinstance(given, Bounded) else given for name, given in call.arguments.items()})
    return exact(found[0]), _first(call, x, found[1])


def _index(call: Call) -> tuple[Bounded, ...]:
    x = _exact_operand(call)
    return (_first(call, x, call.run({name: given.value if isinstance(given, Bounded) else given
                                      for name, given in call.arguments.items()})),)


def _exact_operand(call: Call) -> Bounded:
    x = floats(call)
    if not x.is_exact:
        raise AgentCompileError(f"the reference has no error rule for {call.node.op} of computed values; they stay on the framework")
    return x


def _first(call: Call, x: Bounded, found: Tensor) -> Bounded:
    """The first index of the extreme, whatever the framework took among equals."""
    name = call.node.op.split(".")[1]
    dim = call.arguments.get("dim")
    flat = x.value.reshape(-1) if dim is None else x.value.movedim(int(dim), -1)
    best = (flat.amax(-1, keepdim=True) if name in ("max", "argmax") else flat.amin(-1, keepdim=True)) if flat.numel() else flat
    at = (flat == best) | (flat.isnan() & best.isnan())
    return exact(at.to(torch.uint8).argmax(-1).reshape(found.shape))


def _prod(call: Call) -> tuple[Bounded, ...]:
    """Partial products may leave float32 in one order and not in another; inside it each step rounds once.

    On processors torch rounds each to a shorter element type, whose results no bound could tell from wrong ones.
    """
    x = floats(call)
    axes = _axes(call, x.value)
    wide = x.value.movedim(axes, list(range(-len(axes), 0))).flatten(-len(axes)) if axes else x.value.reshape(1)
    error = x.error.movedim(axes, list(range(-len(axes), 0))).flatten(-len(axes)) if axes else x.error.reshape(1)
    value = wide.prod(-1)
    magnitude = wide.abs().nan_to_num(posinf=1.0)
    largest = magnitude.clamp_min(1.0).log2().sum(-1)
    smallest = torch.where(magnitude > 0, magnitude, 1.0).clamp_max(1.0).log2().sum(-1)
    depth = call.length(wide.shape[-1])
    relative = EVEN * depth**0.5 * U32 + TAIL * (error / magnitude.clamp_min(1e-300)).pow(2).sum(-1).sqrt()
    lost = torch.where(smallest < SMALLEST_NORMAL, depth * SMALLEST * largest.exp2(), 0.0)
    bound = torch.where(largest >= 128.0, torch.inf, value.abs().nan_to_num(posinf=0.0) * relative + lost)
    settled = _settled(wide, error, value, largest)
    bound = torch.where(settled, 0.0, torch.where(value.isfinite(), bound, torch.inf))
    value = torch.where(settled | value.isfinite(), value, 0.0)  # of what is beside an infinite bound nothing is demanded
    shape = call.run({name: given.value if isinstance(given, Bounded) else given for name, given in call.arguments.items()}).shape
    return (Bounded(value.reshape(shape), bound.reshape(shape)),)


def _settled(x: Tensor, error: Tensor, value: Tensor, largest: Tensor) -> Tensor:
    """Where every order gives the same: NaN; zeros among what cannot overflow, or beside an infinity; an infinity that no partial
    product makes a NaN, since none underflows."""
    zero, infinite = ((x == 0) & (error == 0)).any(-1), x.isinf().any(-1)
    least = torch.where(x.isinf(), 1.0, x.abs() - error)
    kept = (least > 0).all(-1) & (least.clamp(torch.finfo(torch.float64).tiny, 1.0).log2().sum(-1) >= SMALLEST_NORMAL)
    return x.isnan().any(-1) | (zero & (infinite | (largest < 128.0))) | (kept & value.isinf())


def _vector_norm(call: Call) -> tuple[Bounded, ...]:
    x, order = floats(call), call.arguments.get("ord", call.arguments.get("p", 2))
    axes, keepdim = _axes(call, x.value), _keepdim(call)
    count = 1
    for axis in axes:
        count *= x.value.shape[axis]
    depth = call.length(max(1, count))
    if order == 1:
        value = x.value.abs().sum(axes, keepdim)
        error = torch.minimum(TAIL * x.error.square().sum(axes, keepdim).sqrt(), x.error.sum(axes, keepdim))
        return (Bounded(value, overflowing(error + SPREAD * depth**0.5 * U32 * value, value)),)
    if order != 2:
        raise AgentCompileError(f"the reference has no error rule for {call.node.op} of order {order}; it stays on the framework")
    squares = x.value.square().sum(axes, keepdim)
    value = squares.sqrt()
    along = TAIL * (x.value * x.error).square().sum(axes, keepdim).sqrt() / value.clamp_min(1e-300)
    spread = along + x.error.square().sum(axes, keepdim).sqrt()
    relative = (0.5 * SPREAD * max(in_blocks(depth), depth / LANES) ** 0.5 + 3.0) * U32
    error = value * relative + torch.where(value > 0, spread + FLUSHED_SQUARE * count**0.5, 0.0)
    return (Bounded(value, overflowing(torch.where(x.error.sum(axes, keepdim) == 0, error, error + spread), squares)),)


def _logsumexp(call: Call) -> tuple[Bounded, ...]:
    """The logarithm of a sum errs by what the sum errs of itself; beside it stand the largest element and the sum of both.

    In half precision torch rounds the differences, their exponentials, the sum and its logarithm to the element type.
    """
    x = floats(call)
    axes = _axes(call, x.value)
    flat = Bounded(_last(x.value, axes), _last(x.error, axes))
    value = flat.value.logsumexp(-1)
    largest = flat.value.amax(-1).abs().nan_to_num(posinf=0.0)
    probability, below, noise, shared = scores(flat, -1)
    relative = total(probability, -1, call.length(max(1, flat.value.shape[-1]))).amax(-1)
    logarithm = (value - flat.value.amax(-1)).abs().nan_to_num(posinf=0.0)
    error = shared.squeeze(-1) + 0.5 * noise.amax(-1) ** 2 + relative + LOGARITHM * U32 * (logarithm + largest)
    if call.dtype in (DType.F16, DType.BF16):
        apart = (probability.nan_to_num() * below).sum(-1)
        error = error + STORED * UNIT_ROUNDOFF[call.dtype] * (2.0 + apart + logarithm)
    shape = call.run({name: given.value if isinstance(given, Bounded) else given for name, given in call.arguments.items()}).shape
    return (Bounded(value.reshape(shape), torch.where(value.isfinite(), error, 0.0).reshape(shape)),)


def _last(x: Tensor, axes: list[int]) -> Tensor:
    """``axes`` as one axis behind all others."""
    return x.movedim(axes, list(range(-len(axes), 0))).flatten(-len(axes)) if axes else x.reshape(1)


def _variance(root: bool) -> Rule:
    """Variance or deviation: errors of elements are independent, that of the mean adds its square.

    An element's distance is taken from a mean so far, which is rounded again with every element (Welford).
    """
    def rule(call: Call) -> tuple[Bounded, ...]:
        x = floats(call)
        axes, keepdim = _axes(call, x.value), _keepdim(call)
        count = 1
        for axis in axes:
            count *= x.value.shape[axis]
        free = count - _correction(call)
        centred = x.value - x.value.mean(axes, keepdim=True)
        value = centred.square().sum(axes, keepdim) / free
        depth = call.length(max(1, count))
        scale = x.value.abs().amax(axes, keepdim=True)
        mean_error = TAIL * x.error.square().sum(axes, True).sqrt() / count + (depth**0.5 / count**0.5 + 2.0) * U32 * scale
        each = x.error + U32 * (2.0 * centred.abs() + RUNNING * x.value.mean(axes, keepdim=True).abs())
        error = 2.0 * TAIL * (centred * each).square().sum(axes, keepdim).sqrt() / free
        error = error + count / free * (each.square().mean(axes, keepdim) + _kept(mean_error.square(), axes, keepdim))
        error = error + value * (0.25 * in_blocks(depth) ** 0.5 + 2.5) * U32
        error = overflowing(torch.where(value.isfinite(), error, 0.0), centred.square().sum(axes, keepdim))
        bound = Bounded(value, error)
        return (pointwise.unary("sqrt", _away_from_zero(bound)) if root else bound,)

    return rule


def _kept(reduced: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    """A tensor whose ``axes`` are of extent 1, with or without them."""
    return reduced if keepdim else reduced.squeeze(axes)


def _away_from_zero(variance: Bounded) -> Bounded:
    """What may be zero has a root between zero and that of its largest; the slope there says nothing."""
    least = torch.where(variance.value <= variance.error, variance.value + variance.error, variance.error)
    return Bounded(variance.value, torch.where(variance.value > 0, least, variance.error))


def _correction(call: Call) -> float:
    if "unbiased" in call.arguments:
        return 1.0 if call["unbiased"] else 0.0
    given = call.arguments.get("correction")
    return 1.0 if given is None else float(given)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("aten.amax.default", "aten.max.default"), _extreme(True)),
    **dict.fromkeys(("aten.amin.default", "aten.min.default"), _extreme(False)),
    **dict.fromkeys(("aten.max.dim", "aten.min.dim"), _extreme_with_index),
    **dict.fromkeys(("aten.argmax.default", "aten.argmin.default"), _index),
    **dict.fromkeys(("aten.prod.default", "aten.prod.dim_int"), _prod),
    "aten.linalg_vector_norm.default": _vector_norm, "aten.logsumexp.default": _logsumexp,
    **dict.fromkeys(("aten.var.correction", "aten.var.dim", "aten.var.default"), _variance(False)),
    **dict.fromkeys(("aten.std.correction", "aten.std.dim", "aten.std.default"), _variance(True)),
}
