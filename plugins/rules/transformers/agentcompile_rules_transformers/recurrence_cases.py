"""Cases of one token of recurrences and of short convolutions."""

from agentcompile_core.plugin_api import DType, Graph, Match, Ref, UsageError, ValueKind, operator_names
from agentcompile_core.testing.matching import matched

from .convolution_step import ConvolutionStepRule
from .draft import Draft
from .recurrence_step import RecurrenceStepRule

FORMS = ("bare", "scan", "delta")
EPS = 1e-6


def recurrence_step_case(*, heads: int, width: int, terms: int, groups: int = 1, form: str = "scan", gated: bool = False,
                         dtype: DType = DType.BF16) -> tuple[Match, Graph]:
    """A step of ``heads`` of ``width`` rows and ``terms``, of which neighbours share the lines of ``groups``.

    ``form``: ``bare``, every operand as the recurrence reads it, decays of every term; ``scan``, as Mamba's layers make them of ``dtype``,
    with rates of every term where heads have one row; ``delta``, as gated delta rules do, from lines that are normed, the state by rows.
    ``gated``: times another value and rounded to ``dtype`` behind it.
    """
    if form not in FORMS:
        raise UsageError(f"unknown form {form!r}; allowed are {', '.join(FORMS)}")
    draft, is_delta = Draft(), form == "delta"
    shape, lines = (1, 1, heads, width), (1, 1, groups, terms)
    kept = (1, heads, terms, width) if is_delta else (1, heads, width, terms)
    state = draft.given("state", kept, DType.F32, ValueKind.STATE)
    x = draft.given("x", shape, dtype)
    keys, queries = (_line(draft, name, lines, form, dtype) for name in ("keys", "queries"))
    first = _turned(draft, state, kept) if is_delta else state
    decay, rates, strength, skip = _scalars(draft, form, heads, (terms if width == 1 else 1, terms), dtype)
    arguments = (first, decay, x, keys, queries, rates, strength, None, skip, form == "scan")
    y, last = draft.call(operator_names.RECURRENCE, arguments, shape, (1, heads, width, terms), dtype=DType.F32)
    if is_delta:
        last = draft.apart("aten.transpose.int", (last, -1, -2), kept, (), DType.F32)[0]
    draft.call(operator_names.COPY, (state, last), kept, dtype=DType.F32, mutates=(state.value,))
    if gated:
        gate = draft.given("gate", shape, dtype)
        y = draft.cast(draft.one("aten.mul.Tensor", (y, gate), shape, DType.F32), shape, dtype)
    return matched(RecurrenceStepRule(), draft.graph(y))


def convolution_step_case(*, channels: int, width: int = 4, silu: bool = True, bias: bool = True, dtype: DType = DType.BF16,
                          ) -> tuple[Match, Graph]:
    """A step of ``channels`` convolutions over ``width`` columns."""
    draft, kept = Draft(), (1, channels, width)
    state = draft.given("state", kept, dtype, ValueKind.STATE)
    x = draft.given("x", (1, channels, 1), dtype)
    weight = draft.weight("weight", channels, width, dtype=dtype)
    given = draft.weight("bias", channels, dtype=dtype) if bias else None
    arguments = (state, x, weight, given, None, silu)
    out, last = draft.call(operator_names.CONVOLUTION, arguments, (1, channels, 1), kept, dtype=dtype)
    draft.call(operator_names.COPY, (state, last), kept, dtype=dtype, mutates=(state.value,))
    return matched(ConvolutionStepRule(), draft.graph(out))


def _turned(draft: Draft, state: Ref, kept: tuple[int, ...]) -> Ref:
    _, heads, terms, width = kept
    return draft.apart("aten.transpose.int", (state, -1, -2), (1, heads, width, terms), (heads * terms * width, terms * width, 1, width),
                       DType.F32)[0]


def _line(draft: Draft, name: str, lines: tuple[int, ...], form: str, dtype: DType) -> Ref:
    if form == "bare":
        return draft.given(name, lines, DType.F32)
    line = draft.cast(draft.given(name, lines, dtype), lines, DType.F32)
    if form == "scan":
        return line
    one = (*lines[:3], 1)
    total = draft.one("aten.sum.dim_IntList", (draft.one("aten.mul.Tensor", (line, line), lines, DType.F32), (-1,), True), one, DType.F32)
    root = draft.one("aten.rsqrt.default", (draft.one("aten.add.Tensor", (total, EPS), one, DType.F32),), one, DType.F32)
    normed = draft.one("aten.mul.Tensor", (line, root), lines, DType.F32)
    return draft.one("aten.mul.Tensor", (normed, lines[3] ** -0.5), lines, DType.F32) if name == "queries" else normed


def _scalars(draft: Draft, form: str, heads: int, terms: tuple[int, int], dtype: DType) -> tuple[Ref, Ref | None, Ref | None, Ref | None]:
    """Decay, rates, strength and skip; ``terms``: how many rates a head has, and terms."""
    of_heads = (1, 1, heads)
    if form == "bare":
        return (draft.given("decay", (*of_heads, terms[1]), DType.F32), None, draft.given("strength", of_heads, DType.F32),
                draft.given("skip", (heads,), DType.F32))
    rates = (heads, terms[0]) if form == "scan" else (heads,)
    logarithm = draft.cast(draft.weight("A_log", *rates, dtype=dtype), rates, DType.F32)
    rate = draft.one("aten.neg.default", (draft.one("aten.exp.default", (logarithm,), rates, DType.F32),), rates, DType.F32)
    bias = draft.weight("dt_bias", heads, dtype=dtype)
    step = draft.one("aten.add.Tensor", (draft.given("decay", of_heads, dtype), bias), of_heads, dtype)
    step = draft.cast(draft.one("aten.softplus.default", (step,), of_heads, dtype), of_heads, DType.F32)
    if form == "scan":
        return step, rate, None, draft.cast(draft.weight("D", heads, dtype=dtype), (heads,), DType.F32)
    decay = draft.one("aten.mul.Tensor", (rate, step), of_heads, DType.F32)
    strength = draft.one("aten.sigmoid.default", (draft.given("strength", of_heads, dtype),), of_heads, dtype)
    return decay, None, draft.cast(strength, of_heads, DType.F32), None
