"""``attention``: append, then torch's scaled dot-product attention over the whole cache, masked by the device's position."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from agentcompile_core.plugin_api import ATTENTION, Implementation, Match, Origin, Reject, Schedule, ScheduleSpace, Target

from .types import mixed

if TYPE_CHECKING:
    from torch import Tensor


class VendorAttention(Implementation):
    """One query row per head. The query heads of one KV head are rows of one query, so that K and V are never repeated."""

    name = "attention"
    version = 2
    origin = Origin.THIRD_PARTY
    capturable = True

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """Attention alone, causal, with a window or in chunks, all of one type."""
        if match.kind != ATTENTION:
            return Reject("serves attention matches only")
        if match.flag("qk_norm") or match.flag("rope"):
            return Reject("scaled_dot_product_attention holds no norm and no RoPE")
        if match.number("softcap", 0.0) != 0.0 or match.operand("sinks") is not None or match.flag("alibi"):
            return Reject("scaled_dot_product_attention has no soft cap, no sinks and no slopes")
        why_not = mixed(match)
        return Reject(why_not) if why_not else True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """No choices."""
        return ScheduleSpace(parameters=(), points=(Schedule({}),))

    def bind(self, match: Match, schedule: Schedule, target: Target) -> "Callable[..., None]":
        """``run(q, k, v, k_cache, v_cache, position, out)``."""
        kv_heads, head_dim, value_dim = match.integer("kv_heads"), match.integer("head_dim"), match.need("v_cache").spec.shape[-1]
        group = match.integer("heads") // kv_heads
        scale, window, chunk = match.number("scale"), match.integer("window", 0), match.integer("chunk", 0)

        def run(q: "Tensor", k: "Tensor", v: "Tensor", k_cache: "Tensor", v_cache: "Tensor", position: "Tensor", out: "Tensor") -> None:
            import torch
            from torch.nn.functional import scaled_dot_product_attention

            k_cache.index_copy_(1, position, k.view(1, 1, kv_heads, head_dim))
            v_cache.index_copy_(1, position, v.view(1, 1, kv_heads, value_dim))
            columns = torch.arange(k_cache.shape[1], device=q.device)
            hidden = columns > position
            if window > 0:
                hidden |= columns <= position - window
            if chunk > 0:
                hidden |= columns < position - position % chunk
            # 0 times NaN is NaN: what is hidden must not take part at all.
            keys, values = (cache.masked_fill(hidden.view(1, -1, 1, 1), 0.0).transpose(1, 2) for cache in (k_cache, v_cache))
            rows = q.view(1, kv_heads, group, head_dim)
            found = scaled_dot_product_attention(rows, keys, values, attn_mask=~hidden.view(1, 1, 1, -1), scale=scale)
            out.view(1, kv_heads, group, value_dim).copy_(found)

        return run
