"""Matches of attention of all rows at once to try a family on; ``testing`` offers them beside all others."""

import math
from collections.abc import Sequence

from agentcompile_core.plugin_api import DType, Graph, Match, Ref, UsageError
from agentcompile_core.testing.matching import matched

from .draft import Draft
from .masked_attention import OPERATOR, MaskedAttentionRule

Pair = tuple[Match, Graph]
SIZES = ("batch", "heads", "kv_heads", "rows", "keys", "head_dim")


def masked_attention_case(*, sizes: Sequence[int], value_dim: int = 0, mask: Sequence[int] = (), added: bool = False, causal: bool = False,
                          turned: bool = True, dtype: DType = DType.F16) -> Pair:
    """Attention of ``sizes`` batch, heads, kv_heads, rows, keys and head_dim; ``value_dim``: the width of V, 0: as K.

    ``mask``: its shape, [] for none, of what is seen, or ``added`` to the scores. ``turned``: q, k, v and the result lie
    [batch, rows, heads, width], as projections leave them.
    """
    if len(sizes) != len(SIZES):
        raise UsageError(f"sizes are {', '.join(SIZES)}, not {tuple(sizes)}")
    batch, heads, kv_heads, rows, keys, width = sizes
    draft, wide = Draft(), value_dim or width
    shapes = {"q": (batch, heads, rows, width), "k": (batch, kv_heads, keys, width), "v": (batch, kv_heads, keys, wide)}
    sides = tuple(_side(draft, name, shape, turned, dtype) for name, shape in shapes.items())
    bias = draft.given("mask", tuple(mask), dtype if added else DType.BOOL) if mask else None
    arguments = (*sides, bias, 0.0, causal)
    keywords = {"scale": 0.7 * width**-0.5, "enable_gqa": heads != kv_heads}
    shape = (batch, heads, rows, wide)
    if not turned:
        return matched(MaskedAttentionRule(), draft.graph(draft.call(OPERATOR, arguments, shape, dtype=dtype, **keywords)[0]))
    (out,) = draft.apart(OPERATOR, arguments, shape, _turned(shape), dtype, **keywords)
    whole = draft.one("aten.transpose.int", (out, 1, 2), (batch, rows, heads, wide), dtype, kind="view")
    return matched(MaskedAttentionRule(), draft.graph(whole))


def _side(draft: Draft, name: str, shape: tuple[int, ...], turned: bool, dtype: DType) -> Ref:
    if not turned:
        return draft.given(name, shape, dtype)
    batch, heads, rows, width = shape
    lies = draft.given(name, (batch, rows, heads, width), dtype)
    return draft.apart("aten.transpose.int", (lies, 1, 2), shape, _turned(shape), dtype)[0]


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of [batch, heads, rows, width] that lies [batch, rows, heads, width]."""
    return math.prod(shape[1:]), shape[3], shape[1] * shape[3], 1
