"""The operators of namespace ``agentcompile``: what a captured decode step is made of besides aten.

Each has a reference body in plain torch, which is also the fallback on every device. Bodies compute in the precision
that HuggingFace computes in, or in float64 where the operands are float64 (the oracle). Nothing here synchronizes
with the host on an accelerator, so every operator can be captured in a graph of the device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from . import convolution, experts, recurrence

NAMESPACE = "agentcompile"

SCHEMAS: dict[str, str] = {
    "attention": "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor position, float scale,"
    " int window=0, float softcap=0.0, Tensor? sinks=None, bool fresh=False, float[]? slopes=None, int chunk=0) -> Tensor",
    "rotary_embedding": "(Tensor position_ids, Tensor inv_freq, float attention_scaling, ScalarType dtype, bool interleaved=False)"
    " -> (Tensor, Tensor)",
    "rms_norm": "(Tensor x, Tensor? weight, float eps, bool one_plus=False, bool once=False) -> Tensor",
    "layer_norm": "(Tensor x, Tensor? weight, float eps) -> Tensor",
    "rope": "(Tensor x, Tensor cos, Tensor sin, bool interleaved=False) -> Tensor",
    "expert_linear": experts.SCHEMA,
    "recurrence": recurrence.SCHEMA,
    "causal_convolution": convolution.SCHEMA,
    "argmax": "(Tensor logits) -> Tensor",
    "cached": "(Tensor x, int layer, bool is_value, int length) -> Tensor",
    "masked": "(Tensor scores, int window) -> Tensor",
    "advance": "(Tensor token, Tensor(a!) ids, Tensor(b!) position, Tensor(c!) history) -> ()",
    "advance_rows": "(Tensor token, Tensor(a!) ids, Tensor(b!) position, Tensor(c!) history, Tensor live) -> ()",
    "start_decode": "(Tensor token, Tensor(a!) ids, Tensor(b!) position, Tensor(c!) history, Tensor start, Tensor length)"
    " -> ()",
}


def _wide(x: Tensor) -> Tensor:
    """``x`` in the type that norms and softmax are computed in: float32, or float64 as it is."""
    return x if x.dtype is torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, one_plus: bool = False, once: bool = False) -> Tensor:
    """``x / rms(x) * weight`` over the last axis, with HuggingFace's roundings.

    Plain: the normalized row is rounded to the type of ``x`` and then multiplied (Llama, Qwen), or is the result where there is
    no weight (nanochat). ``one_plus``: times ``1 + weight`` in float32, rounded once at the end (Gemma). ``once``: times a weight
    of any type in float32, rounded once at the end (OLMo 2).
    """
    wide = _wide(x)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return wide.to(x.dtype)
    if one_plus:
        return (wide * (1.0 + _wide(weight))).to(x.dtype)
    if once:
        return (_wide(weight) * wide).to(x.dtype)
    return weight * wide.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``(x - mean) / std * weight`` over the last axis, in float32 and rounded once.

    As HuggingFace writes it out (Cohere); without a weight as torch computes it in float32 (OLMo).
    """
    wide = _wide(x)
    if weight is None:
        return F.layer_norm(wide, wide.shape[-1:], None, None, eps).to(x.dtype)
    centred = wide - wide.mean(-1, keepdim=True)
    return (_wide(weight) * (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first R of the D channels of ``x`` [1, H, T, D]; ``cos`` and ``sin`` are [1, T, R], by channel.

    Channel i turns with channel i + R / 2 (half style) or, ``interleaved``, 2i with 2i + 1.
    """
    rotary_dim = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    half = rotary_dim // 2
    if interleaved:
        swapped = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
    else:
        swapped = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
    out = (turned * cos) + (swapped * sin)
    return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out


def rotary_embedding(
    position_ids: Tensor, inv_freq: Tensor, attention_scaling: float, dtype: torch.dtype, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """cos and sin [1, T, 2 * half] of ``position_ids`` [1, T] i64 and ``inv_freq`` [half] f32, scaled, as ``dtype``.

    Each frequency stands twice: once in either half, or, ``interleaved``, two times behind each other.
    """
    inv_freq = _wide(inv_freq)
    angles = position_ids[:, :, None].to(inv_freq.dtype) * inv_freq[None, None, :]
    angles = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    return (angles.cos() * attention_scaling).to(dtype), (angles.sin() * attention_scaling).to(dtype)


def argmax(logits: Tensor) -> Tensor:
    """Index of the first maximum of ``logits`` [1, 1, V], as i64 [1]; NaN counts as the maximum."""
    return torch.argmax(logits.reshape(1, -1), dim=-1)


def advance(token: Tensor, ids: Tensor, position: Tensor, history: Tensor) -> None:
    """Move the decode state on: ids[0, 0] = token; history[position + 1] = token; position += 1. All i64."""
    ids.copy_(token.view(1, 1))
    position.add_(1)
    history.index_copy_(0, position.clamp(max=history.shape[0] - 1), token)


def advance_rows(token: Tensor, ids: Tensor, position: Tensor, history: Tensor, live: Tensor) -> None:
    """The same of B rows: ids[0] = token; position += live; history[row, position] = token. token, position and live are [B], ids
    [1, B], history [B, S]; all i64. A row whose ``live`` is 0 stays where it is."""
    ids.copy_(token.view(1, -1))
    position.add_(live)
    history.scatter_(1, position.clamp(max=history.shape[1] - 1).view(-1, 1), token.view(-1, 1))


def start_decode(token: Tensor, ids: Tensor, position: Tensor, history: Tensor, start: Tensor, length: Tensor) -> None:
    """Set the decode state after a prompt: ids[0, 0] = token; position = start + length; history[position] = token."""
    ids.copy_(token.view(1, 1))
    position.copy_(start + length)
    history.index_copy_(0, position.clamp(max=history.shape[0] - 1), token)


def cached(x: Tensor, layer: int, is_value: bool, length: int) -> Tensor:
    """K or V of a layer as a full cache hands them out, [1, KV, length, D]; a mark of capture that no captured graph holds."""
    return x.new_zeros(*x.shape[:2], length, x.shape[3])


def masked(scores: Tensor, window: int) -> Tensor:
    """Scores to which a causal mask was added; a mark of capture that no captured graph holds."""
    return scores.clone()


def append(cache: Tensor, rows: Tensor, position: Tensor, fresh: bool) -> None:
    """Write ``rows`` [1, KV, T, D] into ``cache`` [1, S, KV, D] from ``position`` on; rows beyond S are dropped."""
    capacity, count = cache.shape[1], rows.shape[2]
    rows = rows.transpose(1, 2)
    if fresh:
        kept = min(count, capacity)
        cache[:, :kept].copy_(rows[:, :kept])
        return
    if count == 1:
        cache.index_copy_(1, position, rows)
        return
    # Rows that do not fit repeat the last one that does, so the duplicate writes carry equal bytes.
    index = torch.minimum(torch.arange(count, device=rows.device), capacity - 1 - position)
    cache.index_copy_(1, position + index, rows.index_select(1, index))


@frozen
class AttentionCall:
    """The arguments of ``agentcompile::attention``, in the order and by the names of its schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    position: Tensor
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    fresh: bool = False
    slopes: Sequence[float] | None = None
    chunk: int = 0


def attention(*arguments: Any, **keywords: Any) -> Tensor:
    """Append K and V at ``position``.. and attend causally over positions 0..position + t. Arguments: AttentionCall.

    Shapes: ``q`` [1, H, T, D]; ``k``, ``v`` [1, KV, T, D]; caches [1, S, KV, D]; ``position`` i64 [1], that of row 0;
    ``sinks`` [H]; the result [1, T, H, D], contiguous. ``window`` counts the query itself; 0 means none.
    ``fresh`` promises that position is 0, so that the new K and V are all there is. ``slopes``: one number per query head, by which
    a score falls with every position that its key lies back (ALiBi): ``score + slope * (j - i)``, behind the soft cap. ``chunk``:
    positions are cut into chunks of so many, from position 0 on, and a query sees those of its own chunk alone; 0: no chunks.
    """
    call = AttentionCall(*arguments, **keywords)
    q, count = call.q, call.q.shape[2]
    append(call.k_cache, call.k, call.position, call.fresh)
    append(call.v_cache, call.v, call.position, call.fresh)
    plain = call.softcap == 0.0 and call.sinks is None and call.slopes is None
    if call.fresh and plain and all(size <= 0 or size >= count for size in (call.window, call.chunk)):
        grouped_heads = q.shape[1] != call.k.shape[1]
        out = F.scaled_dot_product_attention(q, call.k, call.v, is_causal=True, scale=call.scale, enable_gqa=grouped_heads)
        return out.transpose(1, 2).contiguous()
    keys, values, rows = _attended(call)
    columns = torch.arange(keys.shape[2], device=q.device)
    mask = seen(rows[:, None], columns, call.window, call.chunk)
    if plain:
        return grouped_sdpa(q, keys, values, mask, call.scale).transpose(1, 2).contiguous()
    return capped(call, keys, values, mask, columns[None, :] - rows[:, None]).transpose(1, 2).contiguous()


def seen(rows: Tensor, columns: Tensor, window: int = 0, chunk: int = 0) -> Tensor:
    """Whether queries at ``rows`` see keys at ``columns``, element by element of what both broadcast to; sizes as in ``attention``."""
    mask = columns <= rows
    if window > 0:
        mask &= columns > rows - window
    if chunk > 0:
        mask &= columns >= rows - rows % chunk
    return mask


def _attended(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """K and V [1, KV, L, D] that are attended over, and the position of each query row."""
    rows = torch.arange(call.q.shape[2], device=call.q.device)
    if call.fresh:
        return call.k, call.v, rows
    # The live length is a number of the host only on the CPU; elsewhere the mask covers the whole capacity.
    capacity = call.k_cache.shape[1]
    live = min(int(call.position) + len(rows), capacity) if call.q.device.type == "cpu" else capacity
    return call.k_cache[:, :live].transpose(1, 2), call.v_cache[:, :live].transpose(1, 2), rows + call.position


def grouped_sdpa(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Masked SDPA where the query heads of one KV head are rows of one query, so that K and V are never repeated."""
    heads, count, dim = q.shape[1:]
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    rows = q.reshape(1, kv_heads, group * count, dim)
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask.repeat(group, 1), scale=scale)
    return out.reshape(1, heads, count, values.shape[-1])


def capped(call: AttentionCall, keys: Tensor, values: Tensor, mask: Tensor, ahead: Tensor) -> Tensor:
    """Attention with a soft cap and slopes on the scores and sinks in the softmax, scores and softmax in float32 or float64.

    ``ahead`` [T, L]: by how many positions a key lies ahead of the query, at most 0 where ``mask`` holds.
    """
    q, scale, softcap, sinks = call.q, call.scale, call.softcap, call.sinks
    heads, count, dim = q.shape[1:]
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    rows = _wide(q).reshape(1, kv_heads, group * count, dim)
    scores = (rows @ _wide(keys).transpose(2, 3)).reshape(1, heads, count, -1) * scale
    if softcap != 0.0:
        scores = torch.tanh(scores / softcap) * softcap
    if call.slopes is not None:
        scores = scores + _row_of(call.slopes, scores).reshape(1, heads, 1, 1) * ahead
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = _wide(sinks).reshape(1, heads, 1, 1).expand(1, heads, count, 1)
        weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = weights.reshape(1, kv_heads, group * count, -1) @ _wide(values)
    return out.reshape(1, heads, count, values.shape[-1]).to(q.dtype)


def _row_of(numbers: Sequence[float], like: Tensor) -> Tensor:
    """The numbers as a tensor on the device of ``like``, without a copy from the host, which no graph of a device may hold."""
    return torch.stack([torch.full((), number, dtype=like.dtype, device=like.device) for number in numbers])


def _fake_attention(*arguments: Any, **keywords: Any) -> Tensor:
    call = AttentionCall(*arguments, **keywords)
    q, v = call.q, call.v
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def _fake_argmax(logits: Tensor) -> Tensor:
    return logits.new_empty(1, dtype=torch.int64)


def _fake_nothing(*_: Tensor) -> None:
    return None


# The others are shape-pure: their bodies serve as their own fakes and keep strides exact.
_FAKES: dict[str, Callable[..., Any]] = {
    "attention": _fake_attention, "argmax": _fake_argmax, "advance": _fake_nothing, "start_decode": _fake_nothing,
    "advance_rows": _fake_nothing,
    "expert_linear": experts.shape_only, "recurrence": recurrence.shape_only,
    "causal_convolution": convolution.shape_only,
}
_BODIES: dict[str, Callable[..., Any]] = {
    "attention": attention, "rotary_embedding": rotary_embedding, "rms_norm": rms_norm, "layer_norm": layer_norm, "rope": rope,
    "expert_linear": experts.expert_linear, "recurrence": recurrence.recurrence, "argmax": argmax, "cached": cached, "masked": masked,
    "causal_convolution": convolution.causal_convolution,
    "advance": advance, "advance_rows": advance_rows, "start_decode": start_decode,
}


def body_of(name: str) -> Callable[..., Any]:
    """The reference body of an operator of the namespace, by its full name (``agentcompile::rope``)."""
    return _BODIES[name.removeprefix(f"{NAMESPACE}::")]


def register() -> None:
    """Register every operator once per process, however often this module is imported.

    The Library is kept by torch's own namespace object: when the last reference to it goes, torch takes the operators
    away under everyone who holds them.
    """
    namespace = torch.ops.agentcompile
    if hasattr(namespace, "start_decode"):
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, _BODIES[name], "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _FAKES.get(name, _BODIES[name]), lib=library)
    namespace.__dict__["_kept_library"] = library


register()
