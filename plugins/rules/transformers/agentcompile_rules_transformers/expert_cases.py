"""Matches of mixtures of experts to try a family on; ``testing`` offers them beside all others."""

from collections.abc import Sequence

from agentcompile_core.plugin_api import DType, Graph, Match, Ref, Symbol, UsageError, operator_names
from agentcompile_core.testing.matching import matched

from .draft import Draft
from .experts import ExpertRule
from .router import RouterRule

Pair = tuple[Match, Graph]
SIZES = ("experts", "slots", "n", "k")


def experts_case(*, sizes: Sequence[int], down: bool = False, activation: str = "silu", bias: bool = False, lies: Sequence[str] = (),
                 wide: bool = False, dtype: DType = DType.F16) -> Pair:
    """The linear layers of chosen experts, of ``sizes`` experts, slots, n and k.

    Plain: gate and up over one row, ``activation(gate) * up``, [slots, n] from [k]; no ``activation``: one matrix and nothing behind it.
    ``down``: of a row per slot, weighted (in float32 where ``wide``), summed over the slots and added to a residual, [n] from [slots, k].
    ``lies``: how matrices do: ``columns`` [k, rows], gate and up ``interleaved`` row by row.
    """
    if len(sizes) != len(SIZES) or not set(lies) <= {"columns", "interleaved"}:
        raise UsageError(f"sizes are {', '.join(SIZES)}, not {tuple(sizes)}; matrices lie in columns or interleaved, not {tuple(lies)}")
    count, slots, n, k = sizes
    columns, interleaved = "columns" in lies, "interleaved" in lies
    draft, rows = Draft(), n * (2 if activation and not down else 1)
    matrices = draft.weight("weight", count, *((k, rows) if columns else (rows, k)), dtype=dtype)
    arguments = (draft.given("x", (1, slots if down else 1, k), dtype), matrices,
                 draft.given("experts", (1, slots), DType.I64), draft.weight("bias", count, rows, dtype=dtype) if bias else None, columns)
    out = draft.one(operator_names.EXPERT_LINEAR, arguments, (1, slots, rows), dtype)
    if down:
        return matched(ExpertRule(), draft.graph(_summed(draft, out, slots, n, DType.F32 if wide else dtype, dtype)))
    return matched(ExpertRule(), draft.graph(_activated(draft, out, slots, n, activation, interleaved, dtype) if activation else out))


def routed_experts_case(*, sizes: Sequence[int], scoring: str = "softmax", bias: DType | None = None, normalized: bool = True,
                        expert_bias: bool = False, lies: Sequence[str] = (), dtype: DType = DType.F16) -> Pair:
    """Gate and up of the experts that a router chooses by the ``scoring`` of logits, plus a ``bias`` of that type; of ``sizes`` experts,
    slots, n and k. The scores are divided by their sum where ``normalized``; ``lies``, ``expert_bias``: of the matrices, as above.
    """
    count, slots, n, k = sizes
    draft, row, some = Draft(), (1, count), (1, slots)
    logits, columns = draft.given("logits", row, dtype), "columns" in lies
    if scoring == "sigmoid":
        wide = draft.cast(logits, row, DType.F32) if dtype is not DType.F32 else logits
        scores = draft.one("aten.sigmoid.default", (wide,), row, DType.F32)
    else:
        scores = draft.one("aten.softmax.int", (logits, -1, Symbol("dtype", "float32")), row, DType.F32)
    added = () if bias is None else (scores, draft.weight("router.bias", count, dtype=bias))
    among = draft.one("aten.add.Tensor", added, row, DType.F32) if added else scores
    best, chosen = draft.call("aten.topk.default", (among, slots), some, some, dtype=DType.F32)
    draft.retype(chosen, DType.I64)
    weights = draft.one("aten.gather.default", (scores, 1, chosen), some, DType.F32) if added else best
    if normalized:
        total = draft.one("aten.sum.dim_IntList", (weights, (-1,), True), (1, 1), DType.F32)
        weights = draft.one("aten.div.Tensor", (weights, total), some, DType.F32)
    matrices = draft.weight("weight", count, *((k, 2 * n) if columns else (2 * n, k)), dtype=dtype)
    biases = draft.weight("bias", count, 2 * n, dtype=dtype) if expert_bias else None
    arguments = (draft.given("x", (1, 1, k), dtype), matrices, chosen, biases, columns)
    out = draft.one(operator_names.EXPERT_LINEAR, arguments, (1, slots, 2 * n), dtype)
    return matched(ExpertRule(), draft.graph(_activated(draft, out, slots, n, "silu", "interleaved" in lies, dtype), weights, chosen))


def _activated(draft: Draft, out: Ref, slots: int, n: int, activation: str, interleaved: bool, dtype: DType) -> Ref:
    flat, shape = draft.one("aten.flatten.using_ints", (out, 0, 1), (slots, 2 * n), dtype, kind="view"), (slots, n)
    if interleaved:
        gate, up = (draft.apart("aten.slice.Tensor", (flat, 1, first, 2 * n, 2), shape, (2 * n, 2), dtype)[0] for first in (0, 1))
    else:
        gate, up = draft.apart("aten.chunk.default", (flat, 2, -1), shape, (2 * n, 1), dtype, count=2)
    active = draft.one(f"aten.{activation}.default", (gate,), shape, dtype)
    product = draft.one("aten.mul.Tensor", (active, up), shape, dtype)
    return draft.one("aten.unflatten.int", (product, 0, (1, slots)), (1, slots, n), dtype, kind="view")


def _summed(draft: Draft, out: Ref, slots: int, n: int, wide: DType, dtype: DType) -> Ref:
    weighted = draft.one("aten.mul.Tensor", (out, draft.given("scale", (1, slots, 1), wide)), (1, slots, n), wide)
    total = draft.one("aten.sum.dim_IntList", (weighted, (1,)), (1, n), wide)
    if wide is not dtype:
        total = draft.cast(total, (1, n), dtype)
    row = draft.one("aten.reshape.default", (total, (1, 1, n)), (1, 1, n), dtype, kind="view")
    return draft.one("aten.add.Tensor", (draft.given("residual", (1, 1, n), dtype), row), (1, 1, n), dtype)


def router_case(*, experts: int, slots: int, after: bool = False, normalized: bool = False, narrow: bool = True,
                dtype: DType = DType.F16) -> Pair:
    """The ``slots`` best of ``experts`` logits and their weights: softmax, then the choice (``normalized``: divided by their sum), or,
    ``after``, the choice and then the softmax of the chosen. ``narrow``: the weights are cast back to ``dtype``.
    """
    draft = Draft()
    logits = draft.given("logits", (1, experts), dtype)
    if not after:
        logits = draft.one("aten.softmax.int", (logits, -1, Symbol("dtype", "float32")), (1, experts), DType.F32)
    wide = dtype if after else DType.F32
    scores, chosen = draft.call("aten.topk.default", (logits, slots), (1, slots), (1, slots), dtype=wide)
    draft.retype(chosen, DType.I64)
    if after:
        scores = draft.one("aten.softmax.int", (scores, 1), (1, slots), wide)
    elif normalized:
        total = draft.one("aten.sum.dim_IntList", (scores, (-1,), True), (1, 1), wide)
        scores = draft.one("aten.div.Tensor", (scores, total), (1, slots), wide)
    if narrow and wide is not dtype:
        scores = draft.cast(scores, (1, slots), dtype)
    return matched(RouterRule(), draft.graph(scores, chosen))


def scored_router_case(*, experts: int, slots: int, scoring: str = "sigmoid", bias: DType | None = None, normalized: str = "",
                       factor: float = 1.0, dtype: DType = DType.F32) -> Pair:
    """The ``slots`` best of ``experts`` by the ``scoring`` of their logits plus a ``bias`` of that type (None: none), and their scores.

    ``normalized``: the scores are divided by their sum and 1e-3 (``guarded``) or by their sum, at least 0.9 (``floored``), or
    (``plain``) by their sum; then multiplied by ``factor``.
    """
    draft, row, some = Draft(), (1, experts), (1, slots)
    logits = draft.given("logits", row, dtype)
    if dtype is not DType.F32 and scoring == "sigmoid":
        logits = draft.cast(logits, row, DType.F32)
    softmax = (logits, -1, Symbol("dtype", "float32"))
    scores = draft.one("aten.sigmoid.default", (logits,), row, DType.F32) if scoring == "sigmoid" else \
        draft.one("aten.softmax.int", softmax, row, DType.F32)
    among = scores if bias is None else draft.one("aten.add.Tensor", (scores, draft.weight("bias", experts, dtype=bias)), row, DType.F32)
    best, chosen = draft.call("aten.topk.default", (among, slots), some, some, dtype=DType.F32)
    draft.retype(chosen, DType.I64)
    weights = best if bias is None else draft.one("aten.gather.default", (scores, 1, chosen), some, DType.F32)
    if normalized:
        total = draft.one("aten.sum.dim_IntList", (weights, (-1,), True), (1, 1), DType.F32)
        if normalized == "guarded":
            total = draft.one("aten.add.Tensor", (total, 1e-3), (1, 1), DType.F32)
        elif normalized == "floored":
            total = draft.one("aten.clamp.default", (total, 0.9), (1, 1), DType.F32)
        weights = draft.one("aten.div.Tensor", (weights, total), some, DType.F32)
    if factor != 1.0:
        weights = draft.one("aten.mul.Tensor", (weights, factor), some, DType.F32)
    return matched(RouterRule(), draft.graph(weights, chosen))
