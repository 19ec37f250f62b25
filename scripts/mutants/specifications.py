"""Of every subject: its name, its family, how its match is made, and what its schedule has to be."""

from collections.abc import Callable
from typing import Any

from agentcompile_rules_transformers import testing as made
from agentcompile_rules_transformers.attention import AttentionRule
from agentcompile_rules_transformers.elementwise import ElementwiseRule
from agentcompile_rules_transformers.rope import RopeTableRule
from attrs import evolve

from agentcompile_core.plugin_api import DType, Graph, Match, Symbol, ValueKind, operator_names
from agentcompile_core.testing.matching import matched

Pair = tuple[Match, Graph]


def _row_broadcast() -> Pair:
    draft, dtype = made.Draft(), DType.F16
    shape = (1, 3, 40)
    x = draft.given("in0", shape, dtype)
    shifted = draft.one("aten.add.Tensor", (x, draft.given("in1", (40,), dtype)), shape, dtype)
    return matched(ElementwiseRule(), draft.graph(draft.one("aten.tanh.default", (shifted,), shape, dtype)))


def _partly_rotated_with_sinks(heads: tuple[int, int], head_dim: int, rotary_dim: int, dtype: DType) -> Pair:
    """Decode attention whose heads rotate in their first ``rotary_dim`` elements, with one sink per query head."""
    draft, capacity = made.Draft(), 96
    table = tuple(draft.given(name, (1, 1, rotary_dim), dtype) for name in ("cos", "sin"))
    sides = []
    for name, count in zip(("q", "k", "v"), (heads[0], heads[1], heads[1]), strict=True):
        side = draft.given(name, (1, 1, count, head_dim), dtype)
        side = draft.one("aten.transpose.int", (side, 1, 2), (1, count, 1, head_dim), dtype, kind="view")
        sides.append(side if name == "v" else draft.one(operator_names.ROPE, (side, *table), (1, count, 1, head_dim), dtype))
    states = [draft.given(name, (1, capacity, heads[1], head_dim), dtype, ValueKind.STATE) for name in ("k_cache", "v_cache")]
    position, sinks = draft.given("position", (1,), DType.I64), draft.weight("sinks", heads[0], dtype=dtype)
    arguments = (*sides, *states, position, head_dim**-0.5, 0, 0.0, sinks)
    shape = (1, 1, heads[0], head_dim)
    return matched(AttentionRule(), draft.graph(*draft.call(operator_names.ATTENTION, arguments, shape, dtype=dtype,
                                                            mutates=("k_cache", "v_cache"))))


def _scaled_table(half: int, scaling: float) -> Pair:
    """The table of a position whose entries are scaled, as long contexts have it."""
    draft, dtype = made.Draft(), DType.F16
    given = (draft.given("position", (1, 1), DType.I64), draft.given("inv_freq", (half,), DType.F32, ValueKind.CONSTANT))
    shapes = [(1, 1, 2 * half)] * 2
    table = draft.call(operator_names.ROTARY, (*given, scaling, Symbol("dtype", dtype.value)), *shapes, dtype=dtype)
    return matched(RopeTableRule(), draft.graph(*table))


def _ordered() -> Pair:
    """The smaller of two numbers and the greater of that and a third, as bounds are written."""
    draft, shape, dtype = made.Draft(), (1, 3, 90), DType.F32
    given = [draft.given(f"in{i}", shape, dtype) for i in range(3)]
    low = draft.one("aten.minimum.default", (given[0], given[1]), shape, dtype)
    return matched(ElementwiseRule(), draft.graph(draft.one("aten.maximum.default", (low, given[2]), shape, dtype)))


def _turned_part() -> Pair:
    """A part of four axes, all of them longer than one and in another order, from behind the beginning of its tensor, in one piece."""
    draft, dtype = made.Draft(), DType.F16
    whole = draft.given("in0", (3, 4, 7, 6), dtype)
    strides = (168, 42, 6, 1)
    part = draft.one("aten.slice.Tensor", (whole, 2, 2, 7), (3, 4, 5, 6), dtype, kind="view")
    draft.values[-1] = evolve(draft.values[-1], spec=evolve(draft.values[-1].spec, strides=strides))
    shape = (5, 3, 6, 4)
    turned = draft.one("aten.permute.default", (part, (2, 0, 3, 1)), shape, dtype, kind="view")
    turned_strides = tuple(strides[axis] for axis in (2, 0, 3, 1))
    draft.values[-1] = evolve(draft.values[-1], spec=evolve(draft.values[-1].spec, strides=turned_strides))
    return matched(ElementwiseRule(), draft.graph(draft.one("aten.contiguous.default", (turned,), shape, dtype, kind="copy")))


def _linear(**said: Any) -> Callable[[], Pair]:
    return lambda: made.linear_case(**said)


def _gated(**said: Any) -> Callable[[], Pair]:
    return lambda: made.gated_case(**said)


def _attention(**said: Any) -> Callable[[], Pair]:
    return lambda: made.attention_case(**said)


def _sloped(**said: Any) -> Callable[[], Pair]:
    return lambda: made.sloped_case(**said)


LANES, TENSOR, STAGED = {"path": "lanes"}, {"path": "tensor"}, {"path": "staged"}
SLICE = {"sm_count": 4}  # of a GPU: small matrices then keep every block busy for several rounds
SPECIFICATIONS: tuple[tuple[str, str, Callable[[], Pair], dict[str, Any]], ...] = (
    ("gemv_rows", "gemv", _linear(n=(40, 24), k=528, norm="rms"), {"path": "direct", "warps_per_row": 1, "rows": 2}),
    ("gemv_rounds", "gemv", _linear(n=(90, 50), k=264, residual=False, dtype=DType.BF16),
     {**SLICE, "path": "direct", "warps_per_row": 1, "rows": 2}),
    ("gemv_combined", "gemv", _linear(n=50, k=700, bias=True, dtype=DType.F32),
     {**SLICE, "path": "direct", "warps": 8, "warps_per_row": 4, "rows": 1, "blocks_per_sm": 2}),
    ("gemv_long_row", "gemv", _linear(n=12, k=5000, norm="layer", dtype=DType.F32), {"path": "direct", "warps": 4}),
    ("gemv_gated", "gemv", _gated(n=40, k=1400, norm="rms_one_plus", activation="gelu", dtype=DType.BF16),
     {"path": "direct", "warps": 8, "warps_per_row": 4}),
    ("gemv_scalar", "gemv", _linear(n=50, k=255, residual=True), {"path": "direct"}),
    ("gemv_layer_f32", "gemv", _linear(n=30, k=388, norm="layer", bias=True, activation="relu", dtype=DType.F32), {"path": "direct"}),
    ("ring_slices", "gemv", _gated(n=60, k=1800, norm="rms"), {"path": "ring", "rows": 1, "columns": 512, "stages": 3, "in_flight": 2}),
    ("ring_rounds", "gemv", _linear(n=150, k=1104, dtype=DType.BF16),
     {**SLICE, "path": "ring", "rows": 1, "columns": 512, "stages": (2, 3, 4), "in_flight": (1, 2)}),
    ("ring_many_rounds", "gemv", _linear(n=900, k=520),
     {**SLICE, "path": "ring", "rows": 1, "stages": (2, 3), "in_flight": (1, 2), "static_groups": None}),
    ("ring_whole_rows", "gemv", _linear(n=300, k=264, residual=True),
     {**SLICE, "path": "ring", "rows": 2, "stages": (2, 3), "static_groups": None}),
    ("ring_dealt", "gemv", _linear(n=700, k=1104, residual=True), {**SLICE, "path": "ring", "rows": 1, "static_groups": (1, 2, 3)}),
    ("ring_dealt_gate", "gemv", _gated(n=500, k=520, norm="rms", dtype=DType.BF16), {**SLICE, "path": "ring", "static_groups": (1, 2, 3)}),
    ("ring_nine_warps", "gemv", _linear(n=72, k=1104, norm="rms", dtype=DType.BF16),
     {**SLICE, "path": "ring", "warps": 9, "rows": 1, "columns": 512, "stages": (2, 3)}),
    ("lanes_split", "attention", _attention(heads=(4, 2), head_dim=64, capacity=160, rope="rms"),
     {**LANES, "merge": "global", "splits": 2, "warps": 4, "lanes": 8, "early_kv": False}),
    ("lanes_early_cluster", "attention", _attention(heads=(4, 2), head_dim=64, capacity=160, rope="rms_one_plus"),
     {**LANES, "merge": "cluster", "splits": 4, "warps": 4, "early_kv": True}),
    ("lanes_messages", "attention", _attention(heads=(3, 1), head_dim=72, capacity=96, rope="none", dtype=DType.F32),
     {**LANES, "merge": "message", "splits": 4, "warps": 4}),
    ("tensor_messages", "attention",
     _sloped(heads=(8, 2), head_dim=64, value_dim=40, capacity=200, slopes=(0.5, 0.02, 0.25, 0.1, 0.01, 0.3, 0.05, 0.4)),
     {**TENSOR, "merge": "message", "splits": 8, "warps": 2, "unroll": 1, "early_kv": True}),
    ("lanes_window_f32", "attention",
     _attention(heads=(2, 2), head_dim=32, capacity=96, window=40, softcap=5.0, rope="rms", dtype=DType.F32),
     {**LANES, "splits": 2, "merge": "global", "early_kv": True}),
    ("lanes_padded", "attention", _attention(heads=(3, 1), head_dim=80, capacity=70, rope="none"), {**LANES, "splits": 1, "lanes": 8}),
    ("lanes_many_splits", "attention", _attention(heads=(1, 1), head_dim=256, capacity=600, rope="none"),
     {**LANES, "splits": 16, "merge": "global", "warps": 4}),
    ("lanes_more_splits_than_teams", "attention", _attention(heads=(1, 1), head_dim=256, capacity=4000, rope="none"),
     {**LANES, "splits": 64, "merge": "global", "warps": 4, "unroll": 2}),
    ("tensor_wide_group", "attention", _attention(heads=(8, 1), head_dim=128, capacity=300),
     {**TENSOR, "splits": 8, "merge": "global", "warps": 4, "unroll": 1, "parts": None}),
    ("tensor_split_bf16", "attention", _attention(heads=(4, 1), head_dim=64, capacity=160, rope="rms", dtype=DType.BF16),
     {**TENSOR, "merge": "global", "splits": 2, "warps": 4, "early_kv": True}),
    ("tensor_cluster_window", "attention", _attention(heads=(4, 2), head_dim=64, capacity=200, window=70, softcap=5.0),
     {**TENSOR, "merge": "cluster", "warps": 2, "splits": 4}),
    ("tensor_narrow_window", "attention", _attention(heads=(4, 2), head_dim=64, capacity=200, window=40, dtype=DType.BF16),
     {**TENSOR, "merge": "global", "warps": 2, "splits": 4, "unroll": 1, "early_kv": False}),
    ("lanes_partial_sinks", "attention", lambda: _partly_rotated_with_sinks((4, 2), 64, 32, DType.F16), {**LANES, "splits": 2}),
    ("tensor_partial_sinks", "attention", lambda: _partly_rotated_with_sinks((4, 1), 128, 64, DType.BF16), {**TENSOR, "splits": 1}),
    ("lanes_slopes", "attention", _sloped(heads=(4, 2), head_dim=96, value_dim=64, capacity=120, slopes=(0.5, 0.02, 0.25, 0.1)),
     {**LANES, "splits": 2}),
    ("lanes_pairs", "attention", _attention(heads=(4, 2), head_dim=64, capacity=96, rope="pairs_wide", dtype=DType.BF16),
     {**LANES, "splits": 2}),
    ("tensor_slopes", "attention", _sloped(heads=(4, 2), head_dim=64, value_dim=96, capacity=120, slopes=(0.5, 0.02, 0.25, 0.1)),
     {**TENSOR, "splits": 1}),
    ("lanes_parts", "attention", _attention(heads=(11, 1), head_dim=64, capacity=96, rope="rms"),
     {**LANES, "merge": "global", "splits": 2, "parts": 2}),
    ("tensor_parts_cluster", "attention", _attention(heads=(26, 2), head_dim=64, capacity=160, rope="none", dtype=DType.BF16),
     {**TENSOR, "merge": "cluster", "splits": 2, "parts": 2}),
    ("staged_early", "attention", _attention(heads=(4, 2), head_dim=64, capacity=420, rope="rms"),
     {**SLICE, **STAGED, "merge": "global", "splits": 2, "warps": 4, "unroll": 2, "early_kv": True}),
    ("staged_chunks", "attention", lambda: made.chunked_case(heads=(4, 2), head_dim=64, capacity=420, chunk=90),
     {**SLICE, **STAGED, "merge": "global", "splits": 2, "warps": 4, "early_kv": True}),
    ("staged_messages_window", "attention", _attention(heads=(3, 1), head_dim=80, capacity=700, window=600, rope="none", dtype=DType.BF16),
     {**SLICE, **STAGED, "merge": "message", "splits": 8, "warps": 4, "unroll": 2, "early_kv": False}),
    ("norm_block", "norm", lambda: made.norm_case(columns=2048), {}),
    ("norm_heads_bf16", "norm", lambda: made.norm_case(columns=128, rows=10, norm="rms_one_plus", dtype=DType.BF16), {"warps_per_row": 1}),
    ("norm_once", "norm", lambda: made.norm_case(columns=136, rows=5, norm="rms_once"), {"warps_per_row": 1}),
    ("norm_residual_odd", "norm", lambda: made.norm_case(columns=1003, rows=2, residual=True), {}),
    ("norm_groups_odd_bf16", "norm", lambda: made.channel_norm_case(shape=(3, 10, 7, 11), groups=2, dtype=DType.BF16),
     {"warps_per_row": (2, 4)}),
    ("norm_looped_groups", "norm", lambda: made.channel_norm_case(shape=(1, 6, 67, 63), groups=2), {"path": "looped", "threads": 512}),
    ("norm_looped_f32", "norm", lambda: made.norm_case(columns=12301, rows=2, norm="layer", dtype=DType.F32), {"path": "looped"}),
    ("norm_tail_bf16", "norm", lambda: made.norm_case(columns=264, rows=3, norm="rms_once", tail=("add", "mul"), weights=DType.F32,
                                                      dtype=DType.BF16), {"warps_per_row": (2, 4)}),
    ("norm_residual_tail", "norm", lambda: made.norm_case(columns=203, rows=2, residual=True, tail=("sub",)), {"warps_per_row": (2, 4)}),
    ("norm_beside", "norm", lambda: made.norms_beside_case(columns=(136, 72), rows=(5, 11)), {"warps_per_row": 1}),
    ("norm_beside_block_bf16", "norm", lambda: made.norms_beside_case(columns=(330, 1030), norm="rms_once", dtype=DType.BF16),
     {"warps_per_row": (4, 8)}),
    ("norm_layer_f32", "norm", lambda: made.norm_case(columns=900, rows=2, norm="layer", dtype=DType.F32), {}),
    ("norm_split_residual", "norm", lambda: made.norm_case(columns=16520, rows=2, residual=True, tail=("add",)),
     {"path": "split", "sm_count": 5}),
    ("norm_split_layer_odd_f32", "norm", lambda: made.norm_case(columns=16403, rows=2, norm="layer", dtype=DType.F32),
     {"path": "split", "sm_count": 7}),
    ("norm_cluster_layer", "norm", lambda: made.norm_case(columns=16520, norm="layer"), {"path": "cluster"}),
    ("norm_cluster_residual_odd_f32", "norm", lambda: made.norm_case(columns=16403, rows=2, residual=True, dtype=DType.F32),
     {"path": "cluster"}),
    ("norm_kept_warps_layer", "norm", lambda: made.norm_case(columns=256, rows=250, norm="layer"),
     {"path": "kept", "lanes": 16, "sm_count": 1}),
    ("norm_kept_block_odd_bf16", "norm", lambda: made.norm_case(columns=603, rows=70, norm="rms_one_plus", dtype=DType.BF16),
     {"path": "kept", "lanes": 64, "sm_count": 1}),
    ("norm_kept_layer_ragged", "norm", lambda: made.norm_case(columns=603, rows=70, norm="layer"),
     {"path": "kept", "lanes": 64, "sm_count": 1}),
    ("norm_kept_residual_f32", "norm", lambda: made.norm_case(columns=200, rows=100, residual=True, dtype=DType.F32),
     {"path": "kept", "sm_count": 1}),
    ("rope", "rope", lambda: made.rope_case(heads=6, head_dim=64), {}),
    ("rope_partial_bf16", "rope", lambda: made.rope_case(heads=3, head_dim=80, rotary_dim=32, dtype=DType.BF16), {}),
    ("rope_heads", "rope", lambda: made.rope_heads_case(heads=3, rotary=24, rest=20, layout="apart"), {}),
    ("rope_heads_shared", "rope", lambda: made.rope_heads_case(heads=4, rotary=16, rest=22, shared=True, dtype=DType.BF16,
                                                               table=DType.F32), {}),
    ("rope_table", "rope_table", lambda: made.rope_table_case(half=48, dtype=DType.F32), {}),
    ("rope_table_scaled", "rope_table", lambda: _scaled_table(half=20, scaling=1.25), {}),
    ("rope_table_interleaved", "rope_table", lambda: made.rope_table_case(half=70, interleaved=True, dtype=DType.BF16), {"threads": 64}),
    ("rope_table_blocks", "rope_table", lambda: made.rope_table_case(half=150), {"threads": 64}),
    ("elementwise_vectors", "elementwise", lambda: made.elementwise_case(columns=2056), {}),
    ("elementwise_odd_bf16", "elementwise", lambda: made.elementwise_case(columns=33, rows=3, operators=("mul", "add", "gelu"),
                                                                         dtype=DType.BF16), {}),
    ("elementwise_chain", "elementwise", lambda: made.elementwise_case(columns=70, operators=("sigmoid", "mul", "tanh", "add", "gelu"),
                                                                      dtype=DType.F32), {}),
    ("elementwise_row", "elementwise", _row_broadcast, {}),
    ("elementwise_channels", "elementwise", lambda: made.batch_norm_case(shape=(2, 5, 3, 7), activation="relu"), {}),
    ("elementwise_ordered_f32", "elementwise", _ordered, {}),
    ("elementwise_turned_part", "elementwise", _turned_part, {}),
    ("elementwise_parts_of_heads", "elementwise", lambda: made.part_case(heads=5, width=24, dtype=DType.BF16), {}),
    ("masked_attention_seen", "masked_attention",
     lambda: made.masked_attention_case(sizes=(2, 4, 2, 9, 45, 24), mask=(2, 1, 1, 45)), {"warps": 4, "rows_per_warp": 1}),
    ("masked_attention_added", "masked_attention",
     lambda: made.masked_attention_case(sizes=(1, 3, 3, 7, 70, 40), mask=(3, 7, 70), added=True, turned=False, dtype=DType.BF16),
     {"warps": 2, "rows_per_warp": 1}),
    ("masked_attention_causal", "masked_attention",
     lambda: made.masked_attention_case(sizes=(2, 2, 1, 37, 37, 36), value_dim=20, causal=True, dtype=DType.F32),
     {"warps": 4, "rows_per_warp": 2}),
    ("masked_attention_wide", "masked_attention", lambda: made.masked_attention_case(sizes=(1, 2, 2, 3, 34, 144)),
     {"warps": 1, "rows_per_warp": 1}),
    ("gather_vectors", "gather", lambda: made.gather_case(columns=520, vocabulary=20, rows=3), {}),
    ("gather_odd_f32", "gather", lambda: made.gather_case(columns=7, vocabulary=9, rows=3, dtype=DType.F32), {}),
    ("gather_long_odd_f32", "gather", lambda: made.gather_case(columns=213, vocabulary=6, rows=2, dtype=DType.F32), {"threads": 64}),
    ("softmax_warp_masked", "softmax", lambda: made.softmax_case(shape=(2, 3, 40), scale=4.0, mask=(40,)),
     {"path": "held", "warps_per_row": 1}),
    ("softmax_warp", "softmax", lambda: made.softmax_case(shape=(5, 200), dtype=DType.BF16), {"path": "held", "lanes": 32, "threads": 128}),
    ("softmax_lanes_log", "softmax", lambda: made.softmax_case(shape=(33, 72), log=True, dtype=DType.F32), {"path": "held", "lanes": 8}),
    ("softmax_lanes_odd", "softmax", lambda: made.softmax_case(shape=(37, 61)), {"path": "held", "lanes": 4}),
    ("softmax_block_f32", "softmax", lambda: made.softmax_case(shape=(2, 1501), dtype=DType.F32),
     {"path": "held", "warps_per_row": (4, 8)}),
    ("softmax_looped_bf16", "softmax", lambda: made.softmax_case(shape=(2, 4609), dtype=DType.BF16), {"path": "looped"}),
    ("softmax_split_log", "softmax", lambda: made.softmax_case(shape=(1, 35900), log=True, dtype=DType.F32), {"path": "split"}),
    ("softmax_split_rows", "softmax", lambda: made.softmax_case(shape=(3, 5003)), {"path": "split", "splits": 4}),
    ("softmax_strided", "softmax", lambda: made.softmax_case(shape=(2, 20, 35), axis=1), {"path": "strided", "warps": 4}),
    ("reduction_warp_product", "reduction", lambda: made.reduction_case(shape=(5, 70), op="aten.prod.dim_int", dtype=DType.F32),
     {"path": "rows", "warps_per_row": 1, "lanes": 32}),
    ("reduction_warp_std", "reduction", lambda: made.reduction_case(shape=(5, 707), op="aten.std.dim", dtype=DType.F32),
     {"path": "rows", "warps_per_row": 1, "lanes": 32}),
    ("reduction_warp_seven_steps", "reduction", lambda: made.reduction_case(shape=(3, 1920), dtype=DType.F32),
     {"path": "rows", "warps_per_row": 1, "lanes": 32}),
    ("reduction_lanes_sum", "reduction", lambda: made.reduction_case(shape=(35, 200)), {"path": "rows", "lanes": 8}),
    ("reduction_lanes_largest", "reduction", lambda: made.reduction_case(shape=(70, 63), op="aten.max.dim", dtype=DType.BF16),
     {"path": "rows", "lanes": 4}),
    ("reduction_block_squares", "reduction", lambda: made.reduction_case(shape=(2, 2100), op="aten.linalg_vector_norm.default"),
     {"path": "rows", "splits": 1, "warps_per_row": (4, 8)}),
    ("reduction_magnitudes", "reduction",
     lambda: made.reduction_case(shape=(3, 131), op="aten.linalg_vector_norm.default", arguments=(1,), dtype=DType.F32),
     {"path": "rows", "warps_per_row": 1}),
    ("reduction_strided_smallest", "reduction", lambda: made.reduction_case(shape=(2, 50, 37), op="aten.amin.default", dim=1),
     {"path": "strided", "splits": 1}),
    ("reduction_parts_sum", "reduction", lambda: made.reduction_case(shape=(1, 35901), before=("mul",), dtype=DType.BF16),
     {"path": "rows", "splits": 35}),
    ("reduction_strided_ragged", "reduction", lambda: made.reduction_case(shape=(2, 12, 100), dim=1), {"path": "strided", "step": 8}),
    ("reduction_first_maximum", "reduction", lambda: made.reduction_case(shape=(3, 300), op="aten.max.dim"), {"path": "rows", "lanes": 32}),
    ("reduction_strided_std", "reduction", lambda: made.reduction_case(shape=(2, 150, 40), op="aten.std.dim", dim=1, dtype=DType.F32),
     {"path": "strided", "splits": 2}),
    ("reduction_strided_argmin", "reduction", lambda: made.reduction_case(shape=(2, 40, 35), op="aten.argmin.default", dim=1),
     {"path": "strided", "splits": 1, "warps": 8}),
    ("reduction_strided_vectors", "reduction", lambda: made.reduction_case(shape=(2, 40, 264), op="aten.mean.dim", dim=1),
     {"path": "strided", "splits": 1, "warps": 4, "step": 8}),
    ("reduction_strided_product", "reduction",
     lambda: made.reduction_case(shape=(1, 515, 40), op="aten.prod.dim_int", dim=1, dtype=DType.F32),
     {"path": "strided", "splits": 1, "warps": 8}),
    ("reduction_exponentials", "reduction",
     lambda: made.reduction_case(shape=(2, 2100), op="aten.logsumexp.default", dtype=DType.F32), {"path": "rows", "splits": 1,
                                                                                                 "warps_per_row": 4}),
    ("reduction_strided_exponentials", "reduction", lambda: made.reduction_case(shape=(2, 50, 37), op="aten.logsumexp.default", dim=1),
     {"path": "strided", "splits": 1, "warps": 8}),
    ("cross_entropy_mean", "reduction", lambda: made.cross_entropy_case(rows=17, columns=1003, dtype=DType.F32), {"warps_per_row": 4}),
    ("cross_entropy_many", "reduction", lambda: made.cross_entropy_case(rows=1100, columns=6, reduction="sum", dtype=DType.F32),
     {"warps_per_row": 1}),
    ("cross_entropy_rows", "reduction", lambda: made.cross_entropy_case(rows=9, columns=72, reduction="none"), {"warps_per_row": 1}),
    ("pool_largest", "reduction",
     lambda: made.pool_case(shape=(2, 3, 19, 23), windows=((3, 2, 1, 2), (4, 1, 2)), op="largest"), {"threads": 128}),
    ("pool_mean", "reduction", lambda: made.pool_case(shape=(2, 7, 9, 11), windows=((2, 1, 1), (3, 2, 1), (2, 1, 1)), op="inside",
                                                      dtype=DType.F32), {"threads": 128}),
    ("scan_warp", "reduction", lambda: made.scan_case(shape=(5, 300), before=("mul",), dtype=DType.BF16),
     {"path": "scan", "warps_per_row": 1}),
    ("scan_block_reverse", "reduction", lambda: made.scan_case(shape=(2, 2100), reverse=True, dtype=DType.F32),
     {"path": "scan", "splits": 1, "warps_per_row": 4}),
    ("scan_parts", "reduction", lambda: made.scan_case(shape=(1, 35901)), {"path": "scan", "splits": 8, "threads": 256}),
    ("scan_strided_product", "reduction", lambda: made.scan_case(shape=(2, 150, 40), axis=1, product=True, reverse=True, dtype=DType.F32),
     {"path": "scan_strided", "warps": 8, "step": 1}),
    ("scan_strided", "reduction", lambda: made.scan_case(shape=(2, 75, 136), axis=1), {"path": "scan_strided", "warps": 4, "step": 8}),
    ("gemm_elements_f32", "gemm", lambda: made.matmul_case(shapes=((2, 37, 45), (2, 45, 70)), bias=(37, 70), dtype=DType.F32),
     {"path": "simt", "splits": 1, "rows": 32, "columns": 32}),
    ("gemm_lines_split", "gemm",
     lambda: made.matmul_case(shapes=((3, 136, 72), (136, 40)), turned="a", activation="gelu", dtype=DType.BF16),
     {"path": "simt", "splits": 2, "rows": 64}),
    ("gemm_rows", "gemm", lambda: made.rows_case(rows=(3, 9), n=72, k=88, bias=True, activation="gelu", residual=True),
     {"path": "simt", "splits": 1, "rows": 16}),
    ("gemm_one_row", "gemm", lambda: made.matmul_case(shapes=((3, 1, 520), (3, 520, 72)), bias=(72,), activation="gelu"),
     {"path": "row", "columns": 32, "cluster": 1, "unroll": 4}),
    ("gemm_one_row_shared", "gemm", lambda: made.matmul_case(shapes=((1, 1098), (1098, 264)), weight=True, dtype=DType.BF16),
     {"path": "row", "columns": 64, "cluster": 4}),
    ("gemm_tensor_groups", "gemm", lambda: made.rows_case(rows=(290,), n=72, k=136, bias=True, residual=True),
     {"path": "tensor", "splits": 1, "rows": 32, "depth": 32}),
    ("gemm_tensor_heads_split", "gemm", lambda: made.matmul_case(shapes=((2, 3, 520, 40), (3, 72, 520)), turned="ab", dtype=DType.BF16),
     {"path": "tensor", "splits": 2}),
    ("gemm_tensor_elements", "gemm", lambda: made.matmul_case(shapes=((70, 171), (171, 75)), bias=(75,)),
     {**SLICE, "path": "tensor", "splits": 1, "ahead": True}),
    ("gemm_tensor_portions", "gemm", lambda: made.rows_case(rows=(200,), n=136, k=200, bias=True, residual=True),
     {**SLICE, "path": "tensor", "splits": 1, "ahead": True, "depth": 64}),
    ("gemm_pieces_rows", "gemm", lambda: made.rows_case(rows=(70,), n=72, k=136, bias=True, residual=True, dtype=DType.F32),
     {"path": "bf16x6", "splits": 1, "rows": 64, "columns": 64}),
    ("gemm_pieces_heads_split", "gemm", lambda: made.matmul_case(shapes=((3, 520, 40), (3, 72, 520)), turned="ab", dtype=DType.F32),
     {"path": "bf16x6", "splits": 4}),
    ("gemm_pieces_elements", "gemm", lambda: made.matmul_case(shapes=((35, 71), (71, 37)), bias=(37,), dtype=DType.F32),
     {"path": "bf16x6", "splits": 1, "rows": 32, "columns": 32}),
    ("experts_gate", "experts", lambda: made.experts_case(sizes=(6, 3, 41, 1032)), {"warps": 4, "rows": 1, "unroll": 2, "turns": 2}),
    ("experts_gate_rows", "experts", lambda: made.experts_case(sizes=(5, 2, 70, 300), lies=("interleaved",), bias=True, activation="gelu",
                                                              dtype=DType.F32), {"warps": 4, "rows": 2, "unroll": 1, "turns": 2}),
    ("experts_scalar", "experts", lambda: made.experts_case(sizes=(3, 3, 41, 131), activation="", bias=True),
     {"warps": 4, "rows": 2, "unroll": 1, "turns": 1}),
    ("experts_sum", "experts", lambda: made.experts_case(sizes=(8, 5, 50, 264), down=True, bias=True, dtype=DType.BF16),
     {"warps": 4, "rows": 2, "unroll": 1, "turns": 4}),
    ("experts_sum_wide", "experts", lambda: made.experts_case(sizes=(6, 3, 37, 117), down=True, wide=True),
     {"warps": 8, "rows": 1, "unroll": 4, "turns": 1}),
    ("experts_columns_gate", "experts", lambda: made.experts_case(sizes=(3, 3, 41, 70), lies=("columns",)),
     {"lanes": 4, "warps": 4, "unroll": 2}),
    ("experts_columns_rows", "experts", lambda: made.experts_case(sizes=(4, 2, 72, 45), bias=True, lies=("columns", "interleaved"),
                                                                 activation="gelu", dtype=DType.F32),
     {"lanes": 8, "warps": 4, "unroll": 4}),
    ("experts_columns_sum", "experts", lambda: made.experts_case(sizes=(5, 4, 88, 50), lies=("columns",), down=True, bias=True,
                                                                wide=True, dtype=DType.BF16), {"lanes": 8, "warps": 4, "unroll": 2}),
    ("experts_stream_gate", "experts", lambda: made.experts_case(sizes=(6, 3, 23, 776)),
     {**SLICE, "path": "stream", "warps": 4, "columns": (256, 512), "in_flight": 2}),
    ("experts_stream_rows", "experts", lambda: made.experts_case(sizes=(6, 3, 23, 264), lies=("interleaved",), bias=True, dtype=DType.F32),
     {**SLICE, "path": "stream", "columns": (272, 384, 512)}),
    ("experts_stream_sum", "experts", lambda: made.experts_case(sizes=(5, 4, 50, 256), down=True, bias=True, wide=True, dtype=DType.BF16),
     {**SLICE, "path": "stream", "warps": 4, "stages": (2, 3, 4)}),
    ("router_all_bf16", "router", lambda: made.router_case(experts=70, slots=5, dtype=DType.BF16), {}),
    ("router_all_f32", "router", lambda: made.router_case(experts=128, slots=8, narrow=False), {}),
    ("router_chosen", "router", lambda: made.router_case(experts=60, slots=4, normalized=True), {}),
    ("router_after_f32", "router", lambda: made.router_case(experts=33, slots=2, after=True, dtype=DType.F32), {}),
    ("router_sigmoid", "router", lambda: made.scored_router_case(experts=70, slots=5, bias=DType.F32, normalized="guarded",
                                                                 factor=2.5), {}),
    ("router_softmax_biased", "router", lambda: made.scored_router_case(experts=40, slots=3, scoring="softmax", bias=DType.BF16,
                                                                        normalized="floored"), {}),
    ("recurrence_rows_alone", "recurrence_step", lambda: made.recurrence_step_case(heads=96, width=1, terms=16, gated=True),
     {"lanes": 4, "held": 2, "warps": 4, "early": True}),
    ("recurrence_groups_f32", "recurrence_step",
     lambda: made.recurrence_step_case(heads=4, width=32, terms=64, groups=2, dtype=DType.F32), {"lanes": 8, "held": 4, "early": False}),
    ("recurrence_delta", "recurrence_step", lambda: made.recurrence_step_case(heads=4, width=32, terms=32, groups=2, form="delta"),
     {"lanes": 8, "early": True}),
    ("recurrence_terms_f32", "recurrence_step",
     lambda: made.recurrence_step_case(heads=2, width=16, terms=48, form="bare", dtype=DType.F32), {"lanes": 4, "held": 1, "early": True}),
    ("convolution_quads", "convolution_step", lambda: made.convolution_step_case(channels=130), {"threads": 64, "early": True}),
    ("convolution_elements_f32", "convolution_step",
     lambda: made.convolution_step_case(channels=33, width=3, silu=False, dtype=DType.F32), {"threads": 64}),
    ("argmax_blocks", "argmax", lambda: made.argmax_case(n=5003), {}),
    ("argmax_rounds", "argmax", lambda: made.argmax_case(n=20011), SLICE),
    ("argmax_advance_bf16", "argmax", lambda: made.argmax_case(n=4100, advance=True, dtype=DType.BF16), {}),
    ("argmax_tiny_f32", "argmax", lambda: made.argmax_case(n=7, dtype=DType.F32), {}),
)
