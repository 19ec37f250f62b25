"""Error rules of norms of rows, and by channel of images and signals [N, C, ..]: of groups, of instances, by given statistics."""

from collections.abc import Callable

from torch import Tensor

from ...errors import AgentCompileError
from .bounded import U32, Bounded, overflowing, times
from .calls import Call
from .reductions import layer_norm, rms_norm

Rule = Callable[[Call], tuple[Bounded, ...]]
SHIFTED = 3.0  # roundings of x * scale + shift, of which scale and shift are made before


def _group_norm(call: Call) -> tuple[Bounded, ...]:
    return (_by_groups(call, int(call["num_groups"])),)


def _instance_norm(call: Call) -> tuple[Bounded, ...]:
    if not call["use_input_stats"] or call["running_mean"] is not None:
        raise AgentCompileError("the reference knows instance norms by the statistics of their inputs only; others stay on the framework")
    return (_by_groups(call, call.bounded("input").value.shape[1]),)


def _by_groups(call: Call, groups: int) -> Bounded:
    """A layer norm of rows of ``groups`` groups of channels, then a weight and a bias per channel.

    The framework makes one factor and one shift per channel of mean, root and weight, so that a large mean brings its roundings.
    """
    x = call.bounded("input")
    shape = x.value.shape
    flat = (shape[0], groups, -1)
    normal = layer_norm(Bounded(x.value.reshape(flat), x.error.reshape(flat)), None, None, float(call["eps"]),
                        call.length(x.value[0].numel() // groups))
    rows = x.value.reshape(flat)
    mean = rows.mean(-1, keepdim=True)
    shifted = (mean * ((rows - mean).square().mean(-1, keepdim=True) + float(call["eps"])).rsqrt()).abs()
    error = normal.error + SHIFTED * U32 * (shifted + normal.value.abs())
    return _affine(call, Bounded(normal.value.reshape(shape), error.reshape(shape)))


def _batch_norm(call: Call) -> tuple[Bounded, ...]:
    """By given statistics; the framework makes one factor and one shift per channel."""
    x, mean, variance = call.bounded("input"), call["running_mean"], call["running_var"]
    if call["training"] or mean is None or variance is None or not (mean.is_exact and variance.is_exact):
        raise AgentCompileError("the reference knows batch norms by given statistics only; others stay on the framework")
    scale = _per_channel(variance.value + float(call["eps"]), x.value).rsqrt()
    shift = _per_channel(mean.value, x.value)
    value = (x.value - shift) * scale
    size = (x.value * scale).abs() + (shift * scale).abs() + value.abs()
    error = overflowing(times(scale, x.error) + SHIFTED * U32 * size, size)
    return (_affine(call, Bounded(value, error)),)


def _affine(call: Call, normal: Bounded) -> Bounded:
    """A weight and a bias per channel, where there are."""
    weight, bias = call["weight"], call["bias"]
    value, error = normal.value, normal.error
    if weight is not None:
        factor, own = (_per_channel(tensor, value) for tensor in (weight.value, weight.error))
        value, error = value * factor, times(factor.abs(), error) + times(value.abs(), own)
    if bias is not None:
        added = _per_channel(bias.value, value)
        total = value + added
        error = error + _per_channel(bias.error, value) + 2.0 * U32 * (value.abs() + total.abs())
        value = total
    return Bounded(value, error)


def _per_channel(given: Tensor, like: Tensor) -> Tensor:
    """[C] as it stands beside [N, C, ..]."""
    return given.reshape(1, -1, *(1,) * (like.dim() - 2))


def _rms(call: Call) -> tuple[Bounded, ...]:
    x, depth = _rows(call)
    if call["eps"] is None:
        raise AgentCompileError("the reference has no error rule for aten.rms_norm.default with an eps that depends on the element type;"
                                " it stays on the framework")
    return (_as_given(call, rms_norm(x, _flat(call["weight"]), float(call["eps"]), False, None, depth)),)


def _layer(call: Call) -> tuple[Bounded, ...]:
    x, depth = _rows(call)
    return (_as_given(call, layer_norm(x, _flat(call["weight"]), _flat(call["bias"]), float(call["eps"]), depth)),)


def _rows(call: Call) -> tuple[Bounded, int]:
    """The operand with all axes that are normalized as its last one, and the length of a row."""
    x, axes = call.bounded("input"), len(call["normalized_shape"])
    rows = Bounded(x.value.flatten(-axes), x.error.flatten(-axes))
    return rows, call.length(rows.value.shape[-1])


def _flat(parameter: Bounded | None) -> Bounded | None:
    return None if parameter is None else Bounded(parameter.value.reshape(-1), parameter.error.reshape(-1))


def _as_given(call: Call, rows: Bounded) -> Bounded:
    shape = call.bounded("input").value.shape
    return Bounded(rows.value.reshape(shape), rows.error.reshape(shape))


RULES: dict[str, Rule] = {
    "aten.rms_norm.default": _rms, "aten.layer_norm.default": _layer,
    "aten.group_norm.default": _group_norm, "aten.instance_norm.default": _instance_norm, "aten.batch_norm.default": _batch_norm,
}
