"""Error rule of the operator ``agentcompile::attention``: append K and V, then attend causally."""

import torch
from attrs import frozen
from torch import Tensor

from ...ir.graph import DType
from .bounded import TINY, U32, UNIT_ROUNDOFF, Bounded
from .reductions import TAIL


def append(cache: Bounded, rows: Bounded, position: int) -> Bounded:
    """``cache`` [1, S, KV, D] with ``rows`` [1, KV, T, D] from ``position`` on; rows beyond S are dropped."""
    kept = min(rows.value.shape[2], cache.value.shape[1] - position)
    value, error = cache.value.clone(), cache.error.clone()
    if kept > 0:
        value[:, position : position + kept] = rows.value[:, :, :kept].transpose(1, 2)
        error[:, position : position + kept] = rows.error[:, :, :kept].transpose(1, 2)
    return Bounded(value, error)


@frozen(kw_only=True)
class Attending:
    """What an attention call says beside its tensors. ``window`` counts the query itself, 0: none; ``softcap`` 0: none.

    Flash kernels may round the probabilities to the element type before they multiply V, hence ``dtype``; ``depth`` is that
    of the error budget.
    """

    position: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    dtype: DType
    depth: int


def attention(q: Bounded, keys: Bounded, values: Bounded, sinks: Bounded | None, how: Attending) -> Bounded:
    """``q`` [1, H, T, D] over the appended caches [1, S, KV, D]; the result is [1, T, H, D]."""
    _, heads, count, dim = q.value.shape
    kv_heads = keys.value.shape[2]
    live = min(how.position + count, keys.value.shape[1])
    k, ek, v, ev = (t[0, :live].transpose(0, 1).unsqueeze(1) for t in (keys.value, keys.error, values.value, values.error))
    x, ex = (t.reshape(kv_heads, heads // kv_heads, count, dim) for t in (q.value, q.error))
    scores, bound = _scores(x, ex, k, ek, how.scale, how.depth)
    if how.softcap:
        scores = torch.tanh(scores / how.softcap) * how.softcap  # slope at most 1
        bound = bound + 16.0 * U32 * how.softcap
    scores = scores.masked_fill(~_mask(live, count, how.position, how.window, q.value.device), float("-inf"))
    probabilities = _probabilities(scores, sinks, kv_heads)
    out = probabilities @ v
    error = _output_error(probabilities, out, bound, v, ev, how.dtype, how.depth)
    shape = (1, heads, count, v.shape[-1])
    return Bounded(out.reshape(shape).transpose(1, 2), error.reshape(shape).transpose(1, 2))


def _scores(x: Tensor, ex: Tensor, k: Tensor, ek: Tensor, scale: float, depth: int) -> tuple[Tensor, Tensor]:
    scores = (x @ k.transpose(-1, -2)) * scale
    size = (x.abs() @ k.abs().transpose(-1, -2)) * abs(scale)
    bound = (2.0 * depth**0.5 + 4.0) * U32 * size
    for error, other, flip in ((ex, k, False), (ek, x, True)):
        if bool(error.any()):
            a, b = (other, error) if flip else (error, other)
            spread = TAIL * ((a**2) @ (b**2).transpose(-1, -2)).sqrt()
            bound = bound + abs(scale) * torch.minimum(spread, a.abs() @ b.abs().transpose(-1, -2))
    return scores, bound


def _mask(live: int, count: int, position: int, window: int, device: torch.device) -> Tensor:
    columns = torch.arange(live, device=device)[None, :]
    rows = torch.arange(count, device=device)[:, None] + position
    mask = columns <= rows
    return mask & (columns > rows - window) if window > 0 else mask


def _probabilities(scores: Tensor, sinks: Bounded | None, kv_heads: int) -> Tensor:
    if sinks is None:
        return scores.softmax(-1)
    group, count = scores.shape[1:3]
    column = sinks.value.reshape(kv_heads, group, 1, 1).expand(kv_heads, group, count, 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def _output_error(p: Tensor, out: Tensor, bound: Tensor, v: Tensor, ev: Tensor, dtype: DType, depth: int) -> Tensor:
    """First order: d out = sum p_j (v_j - out) d s_j, so at most sum p_j b_j |v_j - out| <= sum p_j b_j (|v_j| + |out|)."""
    weighted = p * (bound + (2.0 * depth**0.5 + 32.0) * U32)
    error = weighted @ v.abs() + weighted.sum(-1, keepdim=True) * out.abs()
    error = error + 2.0 * depth**0.5 * U32 * (p @ v.abs())
    for part, other in ((UNIT_ROUNDOFF[dtype] * p + TINY[dtype], v), (p, ev)):
        if bool(other.any()):
            error = error + torch.minimum(TAIL * ((part**2) @ (other**2)).sqrt(), part @ other.abs())
    return error
