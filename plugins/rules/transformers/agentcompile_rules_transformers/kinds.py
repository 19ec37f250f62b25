"""The kinds of these rules' matches, as values. ``T`` is the element type of the model; what names no rows is single-token (decode)."""

import torch
from torch import Tensor

from agentcompile_core.plugin_api import (
    READS,
    WEIGHTS,
    AttributeKind,
    Case,
    DType,
    Graph,
    InputFamily,
    Match,
    MatchKind,
    Operand,
    OperandKind,
    Role,
    SemanticLabel,
    kind_names,
    position_edges,
)

from . import denominators, products, row_sums, sums
from .attention_inputs import FAMILIES, Table, as_seen, telling, value_dim
from .channel_norm import rooted
from .cross_entropy import CROSS_ENTROPIES
from .expert_kinds import EXPERT_LINEAR, ROUTER
from .masked_attention_kind import MASKED_ATTENTION
from .normed_kinds import LINEAR, NORM, NORM_ATTRIBUTES, Normed
from .pool_kind import POOLS
from .recurrence_kinds import CONVOLUTION_STEPS, RECURRENCE_STEPS
from .scan_kind import SCANS

L = SemanticLabel
ROPE_BASE = 1e6
OUT = (Role.OUTPUT,)
STATE = (Role.STATE,)
LENGTH = (Role.LENGTH,)
AXES = 4  # of a strided input
LARGEST_LAST = "largest_last"


def rotation(match: Match, operand: Operand, case: Case, device: str) -> Tensor | None:
    """cos, sin and inverse frequencies as HuggingFace makes them: the angles of a position, twice behind each other.

    In all families but the first the second half is another than the first: what is rotated is said element by element.
    """
    spec = operand.spec
    if operand.name == "inv_freq":
        return (ROPE_BASE ** (-torch.arange(spec.numel, device=device) / spec.numel)).reshape(spec.shape)
    if operand.name not in ("cos", "sin"):
        return None
    half = spec.shape[-1] // 2
    if case.family == denominators.NORMED:
        return torch.full(spec.shape, 1.0 if operand.name == "cos" else 0.0, device=device)
    angles = float(case.position) * ROPE_BASE ** (-torch.arange(half, device=device) / max(half, 1)) + case.seed % 7
    table = torch.cat((angles, angles if case.family == InputFamily.NORMAL else angles.flip(0) + 1.0))
    return (table.cos() if operand.name == "cos" else table.sin()).expand(spec.shape).clone()


def _table(match: Match, case: Case, device: str) -> Table | None:
    """cos and sin of the position, where it has them as operands."""
    cos, sin = (rotation(match, each, case, device) if each is not None else None for each in map(match.operand, ("cos", "sin")))
    return (cos, sin) if cos is not None and sin is not None else None


class Rotary(MatchKind):
    """A kind that reads a table of rotations, or makes one."""

    def positions(self, match: Match, emulated: bool) -> tuple[int, ...]:
        """Large and small angles where it makes the table; else any."""
        return (1000, 0, 1, 4095, 4096, 32767, 131071) if self.name == kind_names.ROPE_TABLE else (3, 4096, 131071)

    def make(self, match: Match, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor | None:
        """Tables of a real position; among spiky ones one factor is 8, since what is called cos may have been multiplied."""
        made = rotation(match, operand, case, device)
        if made is not None and case.family == InputFamily.SPIKY and operand.name in ("cos", "sin"):
            made[..., case.seed % made.shape[-1]] = 8.0
        return made

    def part_read(self, match: Match, operand: Operand) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
        """Of what is rotated its heads, which may lie among others; of the rest what is not rotated."""
        width = {"x": match.integer("rotary_dim", 0), "rest": match.integer("head_dim", 0) - match.integer("rotary_dim", 0)}
        if operand.name not in width:
            return None
        step = match.integer(f"{operand.name}_step")
        return match.integer(f"{operand.name}_first", 0), (match.integer("heads") if step else 1, width[operand.name]), (step, 1)


class Attention(Normed):
    """Decode attention: what it reads of its states, and where its window ends."""

    def flops(self, match: Match, graph: Graph) -> int:
        """Two multiply-adds per channel, head and position of ``state_bytes``."""
        widths = match.integer("head_dim") + value_dim(match)
        row_bytes = match.integer("kv_heads") * widths * match.need("q").spec.dtype.bytes
        return 2 * match.integer("heads") * widths * (match.integer("state_bytes") // row_bytes)

    def positions(self, match: Match, emulated: bool) -> tuple[int, ...]:
        """The edges of the cache, of the window and of chunks."""
        sizes = [size for name, times in (("window", 1), ("chunk", 1), ("chunk", 2)) if (size := times * match.integer(name, 0)) > 0]
        return position_edges(match.integer("capacity"), emulated, tuple(size + by for size in sizes for by in (-1, 0, 1)))

    def make(self, match: Match, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor | None:
        """Tables of the position; what single operands cannot show."""
        made = rotation(match, operand, case, device)
        if made is not None or case.family not in (*FAMILIES, *self.lasting_families(match)):
            return made
        if case.family in FAMILIES:
            return telling(match, operand, case, lambda: _table(match, case, device), device)
        rounded = case.family in (denominators.OFF_STEP, denominators.NORMED)
        query, make = (denominators.row, denominators.of_single_roundings) if rounded else (sums.query, sums.of_attention)
        return make(match, operand, case, as_seen(match, query(match, case, device)[None], _table(match, case, device))[0], device)

    def lasting_families(self, match: Match) -> tuple[str, ...]:
        """The sums of a softmax, of what it weighs, and of normed heads, with all positions that there are."""
        dtype = match.need("v").spec.dtype
        more = (*([sums.UNEVEN_HALF] if dtype is DType.BF16 else ()), *([denominators.NORMED] if match.flag("qk_norm") else ()))
        return (sums.SWAMPED, sums.UNEVEN, denominators.OFF_STEP, *more) if dtype in sums.NARROW else ()


class RowSums(MatchKind):
    """Softmax and reductions: the sums along their axis."""

    def lasting_families(self, match: Match) -> tuple[str, ...]:
        """Sums whose small terms are lost where they are kept in half precision, and those that one rounding moves farthest."""
        return row_sums.families(match)

    def make(self, match: Match, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor | None:
        """Scores and elements of those sums."""
        return row_sums.of_rows(match, operand, case, device) if case.family in row_sums.families(match) else None


class Reduction(RowSums):
    """Reductions: factors of a product are drawn so that it stays in range."""

    def make(self, match: Match, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor | None:
        """Elements of those sums; factors around 1 of either sign, for a product without anything before it."""
        drawn = row_sums.factors(match, operand, case, generator, device)
        return drawn if drawn is not None else super().make(match, operand, case, generator, device)


class Pointwise(MatchKind):
    """Pointwise expressions: the root of what is taken is not of negative numbers."""

    def weight_scale(self, match: Match, operand: Operand) -> tuple[float, float]:
        """Variances of a batch norm are around 1."""
        return (1.0, 0.1) if operand.name in rooted(match) else super().weight_scale(match, operand)

    def part_read(self, match: Match, operand: Operand) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
        """Of a strided input the part that is copied."""
        if match.text("broadcast0", "full") != "strided" or operand.name != "in0":
            return None
        extents, strides = (tuple(match.integer(f"{what}{axis}") for axis in range(AXES)) for what in ("extent", "stride"))
        return match.integer("offset"), extents, strides


class Argmax(MatchKind):
    """The choice of a token: ties, the largest in an element that is read alone, and a decode state that moves on."""

    def lasting_families(self, match: Match) -> tuple[str, ...]:
        """The largest logit last, where vectors do not reach: all others have it in one of many places."""
        return (LARGEST_LAST,)

    def positions(self, match: Match, emulated: bool) -> tuple[int, ...]:
        """The first, the last that leave room behind them, and one that leaves none: then the last element is written again."""
        history = match.operand("history")
        length = history.spec.numel if history is not None else 0
        return tuple(dict.fromkeys(p for p in (1, 0, length // 2, length - 3, length - 2, length - 1) if p >= 0)) if length else (1,)

    def make(self, match: Match, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor | None:
        """The position, which is a state here; logits of which the last is the largest, one is a little less, all others are much less."""
        if operand.name == "logits" and case.family == LARGEST_LAST:
            logits = torch.randn(operand.spec.numel, generator=generator, device=device).clamp(max=3.0)
            logits[torch.randint(0, max(1, operand.spec.numel - 1), (1,), generator=generator, device=device)] = 6.0
            logits[-1] = 8.0
            return logits.reshape(operand.spec.shape)
        if operand.name != "position":
            return None
        return torch.full(operand.spec.shape, case.position, dtype=torch.int64, device=device)


ROPE = Rotary(
    name=kind_names.ROPE, version=3,
    doc="out[h] = head h of x rotated, at channel first; its other channels are those of rest, or of x where there is no rest",
    operands=(OperandKind("x", READS, doc="heads of rotary_dim, head h from element x_first + h * x_step on"),
              OperandKind("rest", READS, optional=True, doc="heads of head_dim - rotary_dim, from element rest_first + h * rest_step on"),
              OperandKind("cos", READS, doc="[.., rotary_dim]"), OperandKind("sin", READS, doc="[.., rotary_dim]"),
              OperandKind("out", OUT, doc="[.., heads, .., head_dim]")),
    attributes=(AttributeKind("heads"), AttributeKind("head_dim"), AttributeKind("rotary_dim"),
                AttributeKind("style", str, "half", doc="half or interleaved"),
                AttributeKind("apart", bool, False, doc="x is read with every second channel first"),
                AttributeKind("first", int, 0, doc="where the rotated channels begin"),
                AttributeKind("x_first", int, 0), AttributeKind("x_step", doc="0: all heads are rotated from one"),
                AttributeKind("rest_first"), AttributeKind("rest_step")),
)
ROPE_TABLE = Rotary(
    name=kind_names.ROPE_TABLE, doc="cos, sin of one position", version=2,
    operands=(OperandKind("position", LENGTH, doc="[1] i64"), OperandKind("inv_freq", WEIGHTS, doc="[half] f32"),
              OperandKind("cos", OUT, doc="[.., 2*half]"), OperandKind("sin", OUT, doc="[.., 2*half]")),
    attributes=(AttributeKind("half"), AttributeKind("attention_scaling", float),
                AttributeKind("style", str, "half", doc="half or interleaved: where each frequency stands twice")),
)
ATTENTION = Attention(
    name=kind_names.ATTENTION, families=FAMILIES, version=9,
    doc="append K, V at position; softmax(q K^T * scale + slope * (j - position)) V over positions j in 0..position",
    operands=(
        OperandKind("q", READS, doc="[H*D]"), OperandKind("k", READS, doc="[KV*D]"), OperandKind("v", READS, doc="[KV*Dv]"),
        OperandKind("q_norm", WEIGHTS, optional=True, doc="[D]"), OperandKind("k_norm", WEIGHTS, optional=True, doc="[D]"),
        OperandKind("cos", READS, optional=True, doc="[rotary]"), OperandKind("sin", READS, optional=True, doc="[rotary]"),
        OperandKind("k_cache", STATE, filled_along=1, doc="[1, S, KV, D]"),
        OperandKind("v_cache", STATE, filled_along=1, doc="[1, S, KV, Dv]"),
        OperandKind("position", LENGTH, doc="[1] i64"), OperandKind("sinks", WEIGHTS, optional=True, doc="[H]"),
        OperandKind("out", OUT, doc="[H*Dv]"),
    ),
    attributes=(
        AttributeKind("heads"), AttributeKind("kv_heads"), AttributeKind("head_dim"),
        AttributeKind("value_dim", int, 0, doc="of V; 0: as head_dim"), AttributeKind("capacity"),
        AttributeKind("scale", float), AttributeKind("window", int, 0, doc="0: none"), AttributeKind("softcap", float, 0.0, doc="0: none"),
        AttributeKind("chunk", int, 0, doc="j begins at position - position % chunk; 0: at the window's end or at 0"),
        AttributeKind("alibi", bool, False, doc="scores fall with distance, behind the soft cap"),
        AttributeKind("slope", float, repeated=True, doc="of each query head: what a score loses per position"),
        AttributeKind("qk_norm", bool, False), AttributeKind("rope", bool, False), *NORM_ATTRIBUTES,
        AttributeKind("interleaved", bool, False, doc="channel 2i is rotated with 2i + 1, instead of i with i + half"),
        AttributeKind("state_bytes", int, doc="KV bytes read at half the capacity, at most 512 positions: where single requests"
                                              " spend most of their steps"),
    ),
)
ELEMENTWISE = Pointwise(
    name=kind_names.ELEMENTWISE, version=4,
    doc="out[i] = epilogue(in0[i], in1[i], ...); each input full or a scalar or one row, or one element per channel,"
        " which is read at (i / inner) modulo its size, or repeated along a middle axis: inner elements for every"
        " inner * count / size of out; or in0 alone, of which out is a part that lies apart",
    operands=(OperandKind("in", READS, repeated=True), OperandKind("out", OUT)),
    attributes=(AttributeKind("count"), AttributeKind("columns"),
                AttributeKind("broadcast", str, repeated=True, doc="full, row, scalar, channel, middle or strided"),
                AttributeKind("inner", int, 1, doc="of channel inputs: neighbours that share an element; of middle ones: how many lie"
                                                   " behind the axis"),
                AttributeKind("offset", int, 0, doc="of a strided input: its first element"),
                AttributeKind("extent", int, repeated=True, doc="of a strided input: of its four axes"),
                AttributeKind("stride", int, repeated=True, doc="of a strided input: of its four axes, in elements")),
)
GATHER = MatchKind(
    name=kind_names.GATHER, doc="out = table[ids]",
    operands=(OperandKind("ids", READS, index_of="table", doc="i64 [rows]"),
              OperandKind("table", WEIGHTS, deviation=1.0, doc="[vocabulary, columns]"), OperandKind("out", OUT)),
    attributes=(AttributeKind("rows"), AttributeKind("columns"), AttributeKind("unread_bytes", int, 0, doc="of the table's other rows")),
)
ARGMAX = Argmax(
    name=kind_names.ARGMAX, doc="token = first index of the maximum; with advance the decode state moves on as well",
    operands=(OperandKind("logits", READS, doc="[.., n]"), OperandKind("token", OUT, doc="i64 [1]"),
              OperandKind("ids", STATE, optional=True, doc="i64, of advance"), OperandKind("position", STATE, optional=True, doc="i64 [1]"),
              OperandKind("history", STATE, optional=True, grows=True, doc="i64 [capacity]")),
    attributes=(AttributeKind("n"), AttributeKind("advance", bool, False)),
)
SOFTMAX = RowSums(
    name=kind_names.SOFTMAX, version=2,
    doc="out = softmax(epilogue(in0, in1, ...)) over the middle axis of [outer, columns, inner], or its logarithm;"
        " element i reads element i modulo its size of every input",
    operands=(OperandKind("in", READS, repeated=True, doc="scores; what scales or masks them, repeated along the leading axes"),
              OperandKind("out", OUT)),
    attributes=(AttributeKind("outer"), AttributeKind("columns"), AttributeKind("inner", int, 1), AttributeKind("log", bool, False)),
)
REDUCTION = Reduction(
    name=kind_names.REDUCTION, version=2, labels=(L.REDUCTION, L.REDUCTION_POINTWISE),
    doc="out = op of epilogue(in0, in1, ...) over the middle axis of [outer, columns, inner], indices = first place of its extreme;"
        " element i reads element i modulo its size of every input",
    operands=(OperandKind("in", READS, repeated=True, doc="elements; what is computed with them, repeated along the leading axes"),
              OperandKind("out", OUT, optional=True), OperandKind("indices", OUT, optional=True, doc="i64, of max and min")),
    attributes=(AttributeKind("outer"), AttributeKind("columns"), AttributeKind("inner", int, 1),
                AttributeKind("op", str, doc="sum, mean, amax, amin, prod, l1, l2, var, std, logsumexp, or max, min with indices"),
                AttributeKind("correction", float, 0.0, doc="of var and std, subtracted from the count")),
)
class Matmul(MatchKind):
    """Products of matrices: factors count as far as they are read, and sums have small terms that half precision would lose."""

    def flops(self, match: Match, graph: Graph) -> int:
        """A multiply-add per term of every element, and what the tail does."""
        terms = match.need("out").spec.numel * match.integer("k")
        return 2 * terms + match.need("out").spec.numel * len(match.epilogue.operations if match.epilogue is not None else ())

    def bytes_moved(self, match: Match, graph: Graph) -> int:
        """Each operand once; of a factor that is a part of something, the part."""
        rest = sum(operand.spec.nbytes for operand in match.operands if operand.name not in ("a", "b"))
        return rest + sum(min(match.need(name).spec.numel, products.extent(match, name)) * match.need(name).spec.dtype.bytes
                          for name in ("a", "b"))

    def reduction_axis(self, match: Match, graph: Graph) -> int:
        """The last one of the first factor, however it is written."""
        return -1

    def weight_scale(self, match: Match, operand: Operand) -> tuple[float, float]:
        """Of matrices whose products have the size of what they are multiplied with."""
        return (0.0, match.integer("k") ** -0.5) if operand.name in ("a", "b") else super().weight_scale(match, operand)

    def lasting_families(self, match: Match) -> tuple[str, ...]:
        """Sums whose small terms are lost where they are kept in half precision."""
        return (sums.SWAMPED,) if match.need("a").spec.dtype in sums.NARROW else ()

    def make(self, match: Match, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor | None:
        """Factors of those sums."""
        return products.swamped(match, operand, case, device) if case.family == sums.SWAMPED else None

    def part_read(self, match: Match, operand: Operand) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
        """Of a factor the elements of its products."""
        return products.part_read(match, operand)


MATMUL = Matmul(
    name=kind_names.MATMUL, labels=(L.GEMM,),
    doc="out[g, i, j] = epilogue(acc0, aux...), acc0 = sum_t a[g, i, t] b[g, t, j], g = (outer, inner); steps of a and b in elements;"
        " element e of out reads element e modulo its size of every aux",
    operands=(OperandKind("a", READS), OperandKind("b", READS),
              OperandKind("aux", READS, repeated=True, doc="a bias, a residual, a mask: repeated along the leading axes"),
              OperandKind("out", OUT, doc="[outer, inner, m, n]")),
    attributes=(
        AttributeKind("outer"), AttributeKind("inner"), AttributeKind("m"), AttributeKind("n"), AttributeKind("k"),
        *(AttributeKind(f"{factor}_{step}", doc=f"of {factor}: {doc}") for factor, row, column in (("a", "i", "t"), ("b", "t", "j"))
          for step, doc in (("offset", "its first element"), ("outer", "a step of outer"), ("inner", "a step of inner"),
                            ("row", f"a step of {row}"), ("column", f"a step of {column}"))),
    ),
)
KINDS = (LINEAR, NORM, ROPE, ROPE_TABLE, ATTENTION, ELEMENTWISE, GATHER, ARGMAX, SOFTMAX, REDUCTION, MATMUL, EXPERT_LINEAR, ROUTER,
         MASKED_ATTENTION, SCANS, POOLS, CROSS_ENTROPIES, RECURRENCE_STEPS, CONVOLUTION_STEPS)
