"""Matches to try a family on: tiny one-token graphs, matched by these rules exactly as in a compilation.

Each function returns the widest match of its graph and the graph of that match alone. Sizes are keyword arguments in
elements; ``dtype`` is the element type of weights and activations.
"""

import math
from collections.abc import Sequence

from attrs import evolve

from agentcompile_core.plugin_api import (
    Argument,
    DType,
    Graph,
    Match,
    Ref,
    Symbol,
    UsageError,
    ValueKind,
    operator_names,
)
from agentcompile_core.testing.matching import matched

from .attention import AttentionRule
from .cross_entropy_cases import cross_entropy_case
from .draft import Draft
from .elementwise import ElementwiseRule
from .expert_cases import experts_case, routed_experts_case, router_case, scored_router_case
from .linear import LinearRule
from .linear_cases import shared_norm_case, summed_case, wide_linear_case
from .lookup import ArgmaxRule, GatherRule
from .masked_attention_cases import masked_attention_case
from .matmul import MatmulRule
from .norm_cases import channel_norm_case, norm_case, norms_beside_case
from .pool_cases import pool_case
from .recurrence_cases import convolution_step_case, recurrence_step_case
from .reduction import ReductionRule
from .rope import RopeRule, RopeTableRule
from .rope_heads import RopeHeadsRule
from .scan_cases import scan_case
from .softmax import SoftmaxRule

Pair = tuple[Match, Graph]
BINARY = ("add", "sub", "mul", "div")
__all__ = [
    "Draft", "Pair", "argmax_case", "attention_case", "batch_norm_case", "channel_norm_case", "convolution_step_case", "cross_entropy_case",
    "elementwise_case", "experts_case", "gated_case", "gather_case", "linear_case", "masked_attention_case", "matmul_case",
    "norm_case", "norms_beside_case", "part_case", "pool_case", "recurrence_step_case", "reduction_case", "rope_case", "rope_heads_case",
    "rope_table_case", "routed_experts_case", "router_case", "rows_case", "scan_case", "scored_router_case",
    "shared_norm_case", "softmax_case", "summed_case", "wide_linear_case",
]


def gather_case(*, columns: int, vocabulary: int, rows: int = 1, dtype: DType = DType.F16) -> Pair:
    """Rows of an embedding table [vocabulary, columns] by int64 ids [1, rows]."""
    draft = Draft()
    table = draft.weight("table", vocabulary, columns, dtype=dtype)
    ids = draft.given("ids", (1, rows), DType.I64)
    return matched(GatherRule(), draft.graph(draft.one("aten.embedding.default", (table, ids), (1, rows, columns), dtype)))


def batch_norm_case(*, shape: Sequence[int], activation: str = "", dtype: DType = DType.F16) -> Pair:
    """A batch norm of ``shape`` [N, C, ..] by given statistics, and an ``activation`` behind it."""
    draft, whole = Draft(), tuple(shape)
    x = draft.given("x", whole, dtype)
    parameters = tuple(draft.weight(name, whole[1], dtype=dtype) for name in ("weight", "bias", "mean", "variance"))
    out = draft.one("aten.batch_norm.default", (x, *parameters, False, 0.1, 1e-5, True), whole, dtype)
    if activation:
        out = draft.one(f"aten.{activation}.default", (out,), whole, dtype)
    return matched(ElementwiseRule(), draft.graph(out))


def linear_case(*, n: int | Sequence[int], k: int, norm: str = "none", bias: bool = False, activation: str = "",
                residual: bool = False, dtype: DType = DType.F16) -> Pair:
    """A linear layer of one token, ``n`` outputs from ``k`` inputs; several ``n``: siblings over one input, such as Q/K/V.

    ``norm`` before it, ``activation`` (``silu``, ``relu``, ...) and ``residual`` behind it (of a single layer only).
    """
    draft = Draft()
    x = _source(draft, k, norm, dtype)
    sizes = [n] if isinstance(n, int) else list(n)
    outputs = [draft.linear(f"linear{i}", x, size, k, dtype, bias) for i, size in enumerate(sizes)]
    if len(sizes) > 1 and (activation or residual):
        raise UsageError("siblings have no activation or residual of their own; give one n")
    shape = (1, 1, sizes[0])
    if activation:
        outputs = [draft.one(f"aten.{activation}.default", (outputs[0],), shape, dtype)]
    if residual:
        outputs = [draft.one("aten.add.Tensor", (draft.given("residual", shape, dtype), outputs[0]), shape, dtype)]
    return matched(LinearRule(), draft.graph(*outputs))


def gated_case(*, n: int, k: int, norm: str = "none", activation: str = "silu", dtype: DType = DType.F16) -> Pair:
    """A gated MLP's first half: ``activation(gate x) * (up x)``, [n] from [k]."""
    draft, shape = Draft(), (1, 1, n)
    x = _source(draft, k, norm, dtype)
    gate, up = (draft.linear(name, x, n, k, dtype) for name in ("gate", "up"))
    active = draft.one(f"aten.{activation}.default", (gate,), shape, dtype)
    return matched(LinearRule(), draft.graph(draft.one("aten.mul.Tensor", (active, up), shape, dtype)))


def elementwise_case(*, columns: int, rows: int = 1, operators: Sequence[str] = ("silu", "mul"), dtype: DType = DType.F16) -> Pair:
    """A chain of pointwise operators on [1, rows, columns]; add, sub, mul and div take another full input each."""
    draft, shape = Draft(), (1, rows, columns)
    x = draft.given("in0", shape, dtype)
    for i, name in enumerate(operators, 1):
        if name in BINARY:
            x = draft.one(f"aten.{name}.Tensor", (x, draft.given(f"in{i}", shape, dtype)), shape, dtype)
        else:
            x = draft.one(f"aten.{name}.default", (x,), shape, dtype)
    return matched(ElementwiseRule(), draft.graph(x))


def part_case(*, heads: int, width: int, parts: int = 3, dtype: DType = DType.F16) -> Pair:
    """The second of ``parts`` that each of ``heads`` heads holds side by side, of ``width`` elements each, in one piece."""
    draft, shape = Draft(), (1, 1, heads, width)
    whole = draft.given("in0", (1, 1, heads, parts, width), dtype)
    part = draft.one("aten.select.int", (whole, 3, 1), shape, dtype, kind="view")
    each = heads * parts * width
    draft.values[-1] = evolve(draft.values[-1], spec=evolve(draft.values[-1].spec, strides=(each, each, parts * width, 1)))
    return matched(ElementwiseRule(), draft.graph(draft.one("aten.contiguous.default", (part,), shape, dtype, kind="copy")))


def rope_case(*, heads: int, head_dim: int, rotary_dim: int = 0, interleaved: bool = False, dtype: DType = DType.F16) -> Pair:
    """The rotation of one token's heads; ``rotary_dim`` 0: all of ``head_dim``."""
    draft, shape = Draft(), (1, heads, 1, head_dim)
    table = tuple(draft.given(name, (1, 1, rotary_dim or head_dim), dtype) for name in ("cos", "sin"))
    arguments = (draft.given("x", shape, dtype), *table, interleaved)
    return matched(RopeRule(), draft.graph(draft.one(operator_names.ROPE, arguments, shape, dtype)))


def rope_heads_case(*, heads: int, rotary: int, rest: int, layout: str = "interleaved", shared: bool = False, dtype: DType = DType.F16,
                    table: DType | None = None) -> Pair:
    """Heads of ``rest`` channels with ``rotary`` rotated ones behind them, both parts of one value, or the rotated ones, ``shared`` by
    all heads, of another. ``layout``: interleaved, half, or apart (interleaved before, halves behind). ``table``: the type of cos and sin,
    if not ``dtype``.
    """
    draft, width, wide = Draft(), rest + rotary, table or dtype
    tables = tuple(draft.given(name, (1, 1, rotary), wide) for name in ("cos", "sin"))
    whole = draft.given("whole", (1, heads, 1, width if not shared else 2 * rest), dtype)
    step = width if not shared else 2 * rest
    strides = (heads * step, step, step, 1)
    kept = draft.apart("aten.slice.Tensor", (whole, 3, 0, rest), (1, heads, 1, rest), strides, dtype)[0]
    if shared:
        x, turning = draft.given("x", (1, 1, 1, rotary), dtype), 1
    else:
        x, turning = draft.apart("aten.slice.Tensor", (whole, 3, rest, width), (1, heads, 1, rotary), strides, dtype)[0], heads
    each = strides if not shared else (rotary, rotary, rotary, 1)
    if layout == "apart":
        paired = draft.apart("aten.view.default", (x, (1, turning, 1, rotary // 2, 2)), (1, turning, 1, rotary // 2, 2),
                             (*each[:3], 2, 1), dtype)[0]
        turned = draft.apart("aten.transpose.int", (paired, -2, -1), (1, turning, 1, 2, rotary // 2), (*each[:3], 1, 2), dtype)[0]
        copied = draft.one("aten.contiguous.default", (turned,), (1, turning, 1, 2, rotary // 2), dtype, kind="copy")
        x = draft.one("aten.view.default", (copied, (1, turning, 1, rotary)), (1, turning, 1, rotary), dtype, kind="view")
    elif not shared:
        x = draft.one("aten.contiguous.default", (x,), (1, turning, 1, rotary), dtype, kind="copy")
    made = draft.one(operator_names.ROPE, (x, *tables, layout == "interleaved"), (1, turning, 1, rotary), wide)
    if wide is not dtype:
        made = draft.cast(made, (1, turning, 1, rotary), dtype)
    if shared:
        made = draft.apart("aten.expand.default", (made, (-1, heads, -1, -1)), (1, heads, 1, rotary), (rotary, 0, rotary, 1), dtype)[0]
    return matched(RopeHeadsRule(), draft.graph(draft.one("aten.cat.default", ((kept, made), -1), (1, heads, 1, width), dtype)))


def rope_table_case(*, half: int, interleaved: bool = False, dtype: DType = DType.F16) -> Pair:
    """cos and sin of one position, [1, 1, 2 * half] each."""
    draft, shape = Draft(), (1, 1, 2 * half)
    position = draft.given("position", (1, 1), DType.I64)
    frequencies = draft.given("inv_freq", (half,), DType.F32, ValueKind.CONSTANT)
    arguments = (position, frequencies, 1.0, Symbol("dtype", dtype.value), interleaved)
    return matched(RopeTableRule(), draft.graph(*draft.call(operator_names.ROTARY, arguments, shape, shape, dtype=dtype)))


def attention_case(*, heads: tuple[int, int], head_dim: int, capacity: int, window: int = 0, softcap: float = 0.0,
                   rope: str = "", dtype: DType = DType.F16) -> Pair:
    """Decode attention that appends K and V first, with ``heads`` of Q and of K and V.

    ``rope``: empty, ``none`` (rotated as they are), or the norm of Q and K that is fused with it (``rms``, ``rms_one_plus``);
    ``pairs``: neighbours are rotated with each other, ``pairs_wide``: in float32, between two casts.
    """
    draft = Draft()
    (q_heads, kv_heads), qk_norm, wide = heads, "none" if rope.startswith("pairs") else rope or "none", rope == "pairs_wide"
    turned = DType.F32 if wide else dtype
    table = tuple(draft.given(name, (1, 1, head_dim), dtype) for name in ("cos", "sin")) if rope else ()
    sides = []
    for name, count in (("q", q_heads), ("k", kv_heads), ("v", kv_heads)):
        side = draft.given(name, (1, 1, count, head_dim), dtype)
        if qk_norm != "none" and name != "v":
            side = draft.norm(f"{name}_norm", side, qk_norm, (1, 1, count, head_dim), dtype)
        side = draft.one("aten.transpose.int", (side, 1, 2), (1, count, 1, head_dim), dtype, kind="view")
        if rope and name != "v":
            shape = (1, count, 1, head_dim)
            side = draft.cast(side, shape, turned) if wide else side
            pairs = (True,) if rope.startswith("pairs") else ()
            side = draft.one(operator_names.ROPE, (side, *table, *pairs), shape, turned)
            side = draft.cast(side, shape, dtype) if wide else side
        sides.append(side)
    return _attended(draft, tuple(sides), capacity, (head_dim**-0.5, window, softcap), dtype)


def sloped_case(*, heads: tuple[int, int], head_dim: int, capacity: int, slopes: Sequence[float], window: int = 0,
                value_dim: int = 0, dtype: DType = DType.F16) -> Pair:
    """Decode attention whose scores fall with distance (ALiBi): one of ``slopes`` per head of Q, empty for none.

    ``value_dim``: the width of V, 0: as K.
    """
    draft = Draft()
    shapes = {"q": (1, heads[0], 1, head_dim), "k": (1, heads[1], 1, head_dim), "v": (1, heads[1], 1, value_dim or head_dim)}
    sides = tuple(draft.given(name, shape, dtype) for name, shape in shapes.items())
    return _attended(draft, sides, capacity, (head_dim**-0.5, window, 0.0, None, False, tuple(slopes) or None), dtype)


def chunked_case(*, heads: tuple[int, int], head_dim: int, capacity: int, chunk: int, dtype: DType = DType.F16) -> Pair:
    """Decode attention over the positions of the token's own chunk of ``chunk``."""
    draft = Draft()
    counts = zip("qkv", (heads[0], heads[1], heads[1]), strict=True)
    sides = tuple(draft.given(name, (1, count, 1, head_dim), dtype) for name, count in counts)
    return _attended(draft, sides, capacity, (head_dim**-0.5, 0, 0.0, None, False, None, chunk), dtype)


def _attended(draft: Draft, sides: tuple[Ref, ...], capacity: int, how: tuple[Argument, ...], dtype: DType) -> Pair:
    """The match of a draft that ends with attention of ``sides`` (q, k, v) over caches; ``how``: what follows the position."""
    shapes = {value.name: value.spec.shape for value in draft.values}
    q, *kept = (shapes[side.value] for side in sides)
    caches = [draft.given(name, (1, capacity, shape[1], shape[3]), dtype, ValueKind.STATE)
              for name, shape in zip(("k_cache", "v_cache"), kept, strict=True)]
    arguments = (*sides, *caches, draft.given("position", (1,), DType.I64), *how)
    out = draft.call(operator_names.ATTENTION, arguments, (1, 1, q[1], kept[1][3]), dtype=dtype, mutates=("k_cache", "v_cache"))
    return matched(AttentionRule(), draft.graph(*out))


def argmax_case(*, n: int, advance: bool = False, dtype: DType = DType.F16) -> Pair:
    """The first index of the maximum of ``n`` logits; with ``advance`` the decode state moves on as well."""
    draft = Draft()
    token = draft.one(operator_names.ARGMAX, (draft.given("logits", (1, 1, n), dtype),), (1,), DType.I64)
    if advance:
        states = ("ids", "position", "history")
        shapes = ((1, 1), (1,), (65,))
        values = tuple(draft.given(name, shape, DType.I64, ValueKind.STATE) for name, shape in zip(states, shapes, strict=True))
        draft.call(operator_names.ADVANCE, (token, *values), dtype=DType.I64, mutates=states)
    return matched(ArgmaxRule(), draft.graph(token))


def softmax_case(*, shape: Sequence[int], axis: int = -1, log: bool = False, scale: float = 1.0, mask: Sequence[int] = (),
                 wide: bool = False, dtype: DType = DType.F16) -> Pair:
    """Softmax of ``shape`` along ``axis``, or its logarithm; ``scale``: of the scores, ``mask``: the shape of what is added to them.

    ``wide``: computed as float32 and cast back, as attention written out does.
    """
    draft, whole = Draft(), tuple(shape)
    x = draft.given("x", whole, dtype)
    if scale != 1.0:
        x = draft.one("aten.div.Tensor", (x, scale), whole, dtype)
    if mask:
        x = draft.one("aten.add.Tensor", (x, draft.given("mask", tuple(mask), dtype)), whole, dtype)
    made = DType.F32 if wide else dtype
    name = f"aten.{'log_' if log else ''}softmax.int"
    out = draft.one(name, (x, axis, *((Symbol("dtype", made.value),) if wide else ())), whole, made)
    if wide:
        out = draft.cast(out, whole, dtype)
    return matched(SoftmaxRule(), draft.graph(out))


def reduction_case(*, shape: Sequence[int], op: str = "aten.sum.dim_IntList", dim: int | Sequence[int] | None = -1, keepdim: bool = False,
                   arguments: Sequence[Argument] = (), before: Sequence[str] = (), dtype: DType = DType.F16) -> Pair:
    """``op`` of ``shape`` along ``dim`` (None: an operator of all elements); ``arguments`` stand between operand and ``dim``.

    ``before``: pointwise operators on the operand; add, sub and mul take another full input each.
    """
    draft, whole = Draft(), tuple(shape)
    x = draft.given("x", whole, dtype)
    for i, name in enumerate(before):
        other = (draft.given(f"other{i}", whole, dtype),) if name in BINARY else ()
        x = draft.one(f"aten.{name}.{'Tensor' if other else 'default'}", (x, *other), whole, dtype)
    axes = {d % len(whole) for d in ((dim,) if isinstance(dim, int) else dim or range(len(whole)))}
    result = tuple(1 if axis in axes else extent for axis, extent in enumerate(whole) if keepdim or axis not in axes)
    along: dict[str, Argument] = {} if dim is None else {"dim": dim if isinstance(dim, int) else tuple(dim), "keepdim": keepdim}
    places = op in ("aten.max.dim", "aten.min.dim")
    outs = draft.call(op, (x, *arguments), *((result,) * (1 + places)), dtype=DType.I64 if ".arg" in op else dtype, **along)
    if places:
        draft.values[-1] = evolve(draft.values[-1], spec=evolve(draft.values[-1].spec, dtype=DType.I64))
    return matched(ReductionRule(), draft.graph(*outs))


def matmul_case(*, shapes: tuple[Sequence[int], Sequence[int]], turned: str = "", weight: bool = False, bias: Sequence[int] = (),
                activation: str = "", residual: bool = False, dtype: DType = DType.F16) -> Pair:
    """``a @ b`` of two ``shapes``; ``turned``: which (``a``, ``b``, ``ab``) are read with their last two axes exchanged.

    ``weight``: b is a parameter. Behind it come the sum with a ``bias`` of that shape, an ``activation``, and the sum with a
    ``residual`` as large as the result.
    """
    draft, sides, seen = Draft(), [], []
    for name, given in zip("ab", map(tuple, shapes), strict=True):
        value = draft.given(name, given, dtype, ValueKind.WEIGHT if weight and name == "b" else ValueKind.INPUT)
        if name in turned:
            value = _turned(draft, value, given, dtype)
            given = (*given[:-2], given[-1], given[-2])
        sides.append(value)
        seen.append(given)
    longer, shorter = sorted((shape[:-2] for shape in seen), key=len, reverse=True)
    batch = tuple(max(x, y) for x, y in zip(longer, (1,) * (len(longer) - len(shorter)) + shorter, strict=True))
    shape = (*batch, seen[0][-2], seen[1][-1])
    return _with_tail(draft, draft.one("aten.matmul.default", tuple(sides), shape, dtype), shape, tuple(bias), activation, residual, dtype)


def rows_case(*, rows: Sequence[int], n: int, k: int, bias: bool = False, activation: str = "", residual: bool = False,
              dtype: DType = DType.F16) -> Pair:
    """A linear layer of several rows, [.., k] to [.., n], with ``activation`` and ``residual`` behind it."""
    draft, shape = Draft(), (*rows, n)
    parameters = (draft.weight("weight", n, k, dtype=dtype), *((draft.weight("bias", n, dtype=dtype),) if bias else ()))
    out = draft.one("aten.linear.default", (draft.given("x", (*rows, k), dtype), *parameters), shape, dtype)
    return _with_tail(draft, out, shape, (), activation, residual, dtype)


def _turned(draft: Draft, value: Ref, shape: tuple[int, ...], dtype: DType) -> Ref:
    """A view with the last two axes exchanged."""
    turned = draft.one("aten.transpose.int", (value, -2, -1), (*shape[:-2], shape[-1], shape[-2]), dtype, kind="view")
    steps = [math.prod(shape[axis + 1:]) for axis in range(len(shape))]
    draft.values[-1] = evolve(draft.values[-1], spec=evolve(draft.values[-1].spec, strides=(*steps[:-2], steps[-1], steps[-2])))
    return turned


def _with_tail(draft: Draft, out: Ref, shape: tuple[int, ...], bias: tuple[int, ...], activation: str, residual: bool,
               dtype: DType) -> Pair:
    if bias:
        out = draft.one("aten.add.Tensor", (out, draft.weight("bias", *bias, dtype=dtype)), shape, dtype)
    if activation:
        out = draft.one(f"aten.{activation}.default", (out,), shape, dtype)
    if residual:
        out = draft.one("aten.add.Tensor", (draft.given("residual", shape, dtype), out), shape, dtype)
    return matched(MatmulRule(), draft.graph(out))


def _source(draft: Draft, k: int, norm: str, dtype: DType) -> Ref:
    x = draft.given("x", (1, 1, k), dtype)
    return x if norm == "none" else draft.norm("norm", x, norm, (1, 1, k), dtype)
