"""Matches to try a family of norms on: with what is around them, beside each other, by channel."""

from collections.abc import Sequence

from agentcompile_core.plugin_api import DType, Graph, Match, Ref
from agentcompile_core.testing.matching import matched

from .draft import Draft
from .norm import NormRule

Pair = tuple[Match, Graph]
BINARY = ("add", "sub", "mul", "div")


def norm_case(*, columns: int, rows: int = 1, norm: str = "rms", residual: bool = False, tail: Sequence[str] = (),
              weights: DType | None = None, dtype: DType = DType.F16) -> Pair:
    """A norm of [1, rows, columns]; with ``residual``, of a sum that others read as well.

    ``tail``: pointwise operators behind it; add, sub, mul and div take another operand of that shape. ``weights``: the type of its
    weight, if not ``dtype``.
    """
    draft, shape = Draft(), (1, rows, columns)
    x = draft.given("x", shape, dtype)
    outputs: tuple[Ref, ...] = ()
    if residual:
        x = draft.one("aten.add.Tensor", (x, draft.given("residual", shape, dtype)), shape, dtype)
        outputs = (x,)
    out = _behind(draft, draft.norm("norm", x, norm, shape, dtype, weights), tail, shape, dtype)
    return matched(NormRule(), draft.graph(out, *outputs))


def _behind(draft: Draft, out: Ref, tail: Sequence[str], shape: tuple[int, ...], dtype: DType) -> Ref:
    for i, name in enumerate(tail):
        others = (draft.given(f"other{i}", shape, dtype),) if name in BINARY else ()
        out = draft.one(f"aten.{name}.{'Tensor' if others else 'default'}", (*others, out), shape, dtype)
    return out


def norms_beside_case(*, columns: tuple[int, int], rows: tuple[int, int] = (1, 1), norm: str = "rms", dtype: DType = DType.F16) -> Pair:
    """Two norms of one kind, of [1, rows, columns] each, that depend on each other in nothing."""
    draft, outputs = Draft(), []
    for i, shape in enumerate((1, *each) for each in zip(rows, columns, strict=True)):
        outputs.append(draft.norm(f"norm{i}", draft.given(f"x{i}", shape, dtype), norm, shape, dtype))
    return matched(NormRule(), draft.graph(*outputs))


def channel_norm_case(*, shape: Sequence[int], groups: int = 0, weight: bool = True, tail: Sequence[str] = (),
                      dtype: DType = DType.F16) -> Pair:
    """A group norm of ``shape`` [N, C, ..], with or without a weight and a bias per channel; ``groups`` 0: an instance norm.

    ``tail``: as of ``norm_case``.
    """
    draft, whole = Draft(), tuple(shape)
    x = draft.given("x", whole, dtype)
    parameters = tuple(draft.weight(name, whole[1], dtype=dtype) if weight else None for name in ("weight", "bias"))
    if groups:
        out = draft.one("aten.group_norm.default", (x, groups, *parameters, 1e-6), whole, dtype)
    else:
        out = draft.one("aten.instance_norm.default", (x, *parameters, None, None, True, 0.1, 1e-6, True), whole, dtype)
    return matched(NormRule(), draft.graph(_behind(draft, out, tail, whole, dtype)))
