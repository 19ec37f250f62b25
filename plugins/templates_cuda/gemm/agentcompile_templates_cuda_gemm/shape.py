"""The facts about one product and its target that schedules depend on."""

from attrs import frozen

from agentcompile_core.plugin_api import DType, Match, Operand, Role, Tiling

VECTOR_BYTES = 16
ALONG_TERMS, ALONG_LINES = 1, 2  # as in gemm.cuh


@frozen(kw_only=True)
class Reading:
    """How a factor is read: along which of its axes neighbours lie, and how many at a time (1, or a vector of 16 bytes)."""

    along: int
    size: int
    view: Tiling | None = None  # of axes along, across, inner, outer, for tiles of one element; None where no copy engine fetches it
    moves: tuple[int, int] = (0, 0)  # 1 where products that are neighbours along outer, inner read other elements

    def held_by(self, lines: int) -> int:
        """Elements at a time where a tile has so many lines."""
        return 1 if self.along == ALONG_LINES and lines % self.size else self.size


@frozen(kw_only=True)
class Shape:
    """``batch`` products [m, k] x [k, n] of ``dtype``; ``whole``: the largest group of columns that a store may write at once."""

    batch: int
    m: int
    n: int
    k: int
    dtype: DType
    a: Reading
    b: Reading
    whole: int

    @property
    def count(self) -> int:
        """Elements of the result."""
        return self.batch * self.m * self.n


def shape_of(match: Match) -> Shape:
    """The shape of a ``matmul`` match."""
    m, n, k = (match.integer(name) for name in ("m", "n", "k"))
    a = _reading(match, match.need("a"), (m, "a_row"), (k, "a_column"))
    b = _reading(match, match.need("b"), (n, "b_column"), (k, "b_row"))
    return Shape(batch=match.integer("outer") * match.integer("inner"), m=m, n=n, k=k, dtype=match.need("a").spec.dtype, a=a, b=b,
                 whole=_whole(match.need("out"), n))


def _reading(match: Match, factor: Operand, lines: tuple[int, str], terms: tuple[int, str]) -> Reading:
    """Vectors where every one of them lies wholly inside its axis and begins at a multiple of 16 bytes."""
    (line_count, line_name), (term_count, term_name) = lines, terms
    line_step, term_step = match.integer(line_name), match.integer(term_name)
    by_terms = term_step == 1 or (line_step != 1 and 0 < term_step <= line_step)
    extent, step, other = (term_count, term_step, line_step) if by_terms else (line_count, line_step, term_step)
    size = VECTOR_BYTES // factor.spec.dtype.bytes
    rest = [other, extent, *(match.integer(f"{factor.name}_{name}") for name in ("offset", "outer", "inner"))]
    vectors = step == 1 and _is_aligned(factor) and not any(value % size for value in rest)
    along = ALONG_TERMS if by_terms else ALONG_LINES
    if not vectors:
        return Reading(along=along, size=1)
    axes = [(match.integer(name), match.integer(f"{factor.name}_{name}")) for name in ("inner", "outer")]
    return Reading(along=along, size=size, view=_view(match, factor, [(extent, 1), (term_count + line_count - extent, other), *axes], size),
                   moves=(int(axes[1][1] > 0), int(axes[0][1] > 0)))


def _view(match: Match, factor: Operand, axes: list[tuple[int, int]], size: int) -> Tiling | None:
    """Extents and steps of the axes, all positive: an axis that is not moved along has one element, and steps over the axis before it."""
    (_, (lines, across), *batch) = axes
    if across < 0 or (across == 0 and lines > 1) or any(step < 0 for _, step in batch):
        return None
    moved = [axes[0]]
    for extent, step in axes[1:]:
        moved.append((extent, step) if step and extent > 1 else (1, -(-moved[-1][0] * moved[-1][1] // size) * size))
    return Tiling(offset=match.integer(f"{factor.name}_offset"), extents=tuple(extent for extent, _ in moved),
                  steps=tuple(step for _, step in moved), tile=(1,) * len(moved))



def _is_aligned(operand: Operand) -> bool:
    """Whether the runtime promises an address that is a multiple of 16 bytes: activations lie side by side, weights do not."""
    return operand.role in (Role.WEIGHT, Role.CONSTANT) or operand.spec.nbytes % VECTOR_BYTES == 0


def _whole(out: Operand, n: int) -> int:
    if not _is_aligned(out):
        return 1
    return next(size for size in (4, 2, 1) if n % size == 0)
