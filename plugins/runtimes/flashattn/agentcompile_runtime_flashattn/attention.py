"""``attention``: one decode step by flash-attn's ``flash_attn_with_kvcache``, in place in the cache of the session."""

import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from agentcompile_core.plugin_api import (
    ATTENTION,
    DType,
    Implementation,
    Match,
    Origin,
    Parameter,
    Reject,
    Role,
    Schedule,
    ScheduleSpace,
    Target,
)

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = "flash_attn"
LARGEST_HEAD, HEAD_STEP = 256, 8
TYPES = (DType.F16, DType.BF16)
SPLITS = (0, 1, 4, 16, 32)  # 0: as flash-attn guesses from the capacity, which a captured graph keeps


class FlashAttention(Implementation):
    """One query row per head over the cache [1, capacity, kv_heads, head_dim], whose length the device knows.

    The library appends K and V at the position and attends over what lies below it and over them. It asks the host for nothing, so
    that a captured graph may hold it. ``splits``: into how many parts it cuts the cache's length.
    """

    name = "attention"
    version = 1
    origin = Origin.THIRD_PARTY
    capturable = True

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """Attention alone, causal or with a window or a soft cap, in half precision, where the package is."""
        if match.kind != ATTENTION:
            return Reject("serves attention matches only")
        if match.flag("qk_norm") or match.flag("rope"):
            return Reject("flash_attn_with_kvcache is used without a norm and without RoPE")
        if match.operand("sinks") is not None or match.flag("alibi") or match.integer("chunk", 0) > 0:
            return Reject("flash_attn_with_kvcache is used without sinks, slopes and chunks of positions")
        found = {operand.spec.dtype for operand in match.operands if operand.role is not Role.LENGTH}
        if len(found) > 1 or not found <= set(TYPES):
            return Reject(f"flash-attn takes float16 or bfloat16 throughout, not {', '.join(sorted(dtype.value for dtype in found))}")
        width, value_width = (match.need(name).spec.shape[-1] for name in ("k_cache", "v_cache"))
        if width != value_width or width > LARGEST_HEAD or width % HEAD_STEP:
            return Reject(f"heads of {width} (V: {value_width}); flash-attn takes equal ones, multiples of {HEAD_STEP} to {LARGEST_HEAD}")
        if not is_installed():
            return Reject("the package flash-attn is not installed; install it, or put the folder that holds it on PYTHONPATH")
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """Numbers of splits; more than there are positions for make no sense."""
        fits = tuple(splits for splits in SPLITS if splits * HEAD_STEP <= max(match.integer("capacity"), HEAD_STEP))
        return ScheduleSpace(parameters=(Parameter(name="splits", values=SPLITS),), points=tuple(Schedule({"splits": s}) for s in fits))

    def bind(self, match: Match, schedule: Schedule, target: Target) -> "Callable[..., None]":
        """``run(q, k, v, k_cache, v_cache, position, out)``."""
        kv_heads, width = match.integer("kv_heads"), match.integer("head_dim")
        heads, splits, window = match.integer("heads"), int(schedule["splits"]), match.integer("window", 0)
        scale, softcap = match.number("scale"), match.number("softcap", 0.0)
        seen = (window - 1, 0) if window > 0 else (-1, -1)

        def run(q: "Tensor", k: "Tensor", v: "Tensor", k_cache: "Tensor", v_cache: "Tensor", position: "Tensor", out: "Tensor") -> None:
            import torch
            from flash_attn import flash_attn_with_kvcache

            row = (1, 1, kv_heads, width)
            found = flash_attn_with_kvcache(
                q.view(1, 1, heads, width), k_cache, v_cache, k=k.view(row), v=v.view(row), cache_seqlens=position.to(torch.int32),
                softmax_scale=scale, causal=True, window_size=seen, softcap=softcap, num_splits=splits)
            out.view(1, 1, heads, width).copy_(found)

        return run


@functools.cache
def is_installed() -> bool:
    """Whether the package can be imported, without importing it."""
    return importlib.util.find_spec(PACKAGE) is not None
