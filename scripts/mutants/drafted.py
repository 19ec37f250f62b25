"""Matches of subjects that no case of the rules makes: drafted here, node by node."""

from agentcompile_rules_transformers import testing as made
from agentcompile_rules_transformers.attention import AttentionRule
from agentcompile_rules_transformers.elementwise import ElementwiseRule
from agentcompile_rules_transformers.linear import LinearRule
from agentcompile_rules_transformers.rope import RopeTableRule
from attrs import evolve

from agentcompile_core.plugin_api import DType, Graph, Match, Symbol, ValueKind, operator_names
from agentcompile_core.testing.matching import matched

Pair = tuple[Match, Graph]


def row_broadcast() -> Pair:
    """A row that is added to each of several."""
    draft, dtype = made.Draft(), DType.F16
    shape = (1, 3, 40)
    x = draft.given("in0", shape, dtype)
    shifted = draft.one("aten.add.Tensor", (x, draft.given("in1", (40,), dtype)), shape, dtype)
    return matched(ElementwiseRule(), draft.graph(draft.one("aten.tanh.default", (shifted,), shape, dtype)))


def six_inputs() -> Pair:
    """The sum of as many inputs as a kernel takes."""
    draft, dtype, shape = made.Draft(), DType.F16, (3, 264)
    total = draft.given("in0", shape, dtype)
    for number in range(1, 6):
        total = draft.one("aten.add.Tensor", (total, draft.given(f"in{number}", shape, dtype)), shape, dtype)
    return matched(ElementwiseRule(), draft.graph(total))


def tanh_gelu() -> Pair:
    """A linear layer with the approximate gelu behind it."""
    draft, shape = made.Draft(), (1, 1, 40)
    out = draft.linear("linear", draft.given("x", (1, 1, 264), DType.F32), 40, 264, DType.F32, False)
    return matched(LinearRule(), draft.graph(*draft.call("aten.gelu.default", (out,), shape, dtype=DType.F32, approximate="tanh")))


def partly_rotated_with_sinks(heads: tuple[int, int], head_dim: int, rotary_dim: int, dtype: DType) -> Pair:
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


def scaled_table(half: int, scaling: float) -> Pair:
    """The table of a position whose entries are scaled, as long contexts have it."""
    draft, dtype = made.Draft(), DType.F16
    given = (draft.given("position", (1, 1), DType.I64), draft.given("inv_freq", (half,), DType.F32, ValueKind.CONSTANT))
    shapes = [(1, 1, 2 * half)] * 2
    table = draft.call(operator_names.ROTARY, (*given, scaling, Symbol("dtype", dtype.value)), *shapes, dtype=dtype)
    return matched(RopeTableRule(), draft.graph(*table))


def ordered() -> Pair:
    """The smaller of two numbers and the greater of that and a third, as bounds are written."""
    draft, shape, dtype = made.Draft(), (1, 3, 90), DType.F32
    given = [draft.given(f"in{i}", shape, dtype) for i in range(3)]
    low = draft.one("aten.minimum.default", (given[0], given[1]), shape, dtype)
    return matched(ElementwiseRule(), draft.graph(draft.one("aten.maximum.default", (low, given[2]), shape, dtype)))


def turned_part() -> Pair:
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
