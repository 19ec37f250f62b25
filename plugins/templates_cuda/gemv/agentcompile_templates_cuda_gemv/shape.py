"""The facts about one linear match and its target that schedules depend on."""

from __future__ import annotations

from attrs import frozen

from agentcompile_core.plugin_api import Match, Target

WARP_SIZE = 32
VECTOR_BYTES = 16


def ceil_div(numerator: int, denominator: int) -> int:
    """Quotient rounded up."""
    return -(-numerator // denominator)


@frozen(kw_only=True)
class Shape:
    """``weight [pair * n, k]`` of ``element_bytes``; ``norm`` of x on the way in, or "none"; ``summed``: of a residual and a normed x;
    ``written``: others read it as well."""

    n: int
    k: int
    pair: int
    element_bytes: int
    norm: str
    summed: bool = False
    written: bool = False

    @property
    def vector(self) -> int:
        """Elements in 16 bytes."""
        return VECTOR_BYTES // self.element_bytes

    @property
    def vectorized(self) -> bool:
        """Whether every row starts at a multiple of 16 bytes, given that the matrix does."""
        return self.k % self.vector == 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight, read once."""
        return self.pair * self.n * self.k * self.element_bytes

    def blocks(self, target: Target, blocks_per_sm: int, groups: int) -> int:
        """Grid size: ``blocks_per_sm`` on every SM, and never more than give each of a block's ``groups`` of warps a row."""
        return max(1, min(target.sm_count * blocks_per_sm, ceil_div(self.n, groups)))

    def row_waste(self, blocks: int, rows_per_round: int) -> float:
        """Share of a block's row slots that stay empty in its last round; 0 is perfect."""
        rows = ceil_div(self.n, blocks)
        slots = ceil_div(rows, rows_per_round) * rows_per_round
        return 1.0 - self.n / (blocks * slots)

    def sm_waste(self, target: Target, blocks: int, rows_per_round: int) -> float:
        """As ``row_waste``, of the SM that has most blocks: what the others wait for."""
        slots = ceil_div(ceil_div(self.n, blocks), rows_per_round) * rows_per_round
        return 1.0 - self.n / (target.sm_count * ceil_div(blocks, target.sm_count) * slots)


def shape_of(match: Match) -> Shape:
    """The shape of a ``linear`` match."""
    return Shape(
        n=match.integer("n"),
        k=match.integer("k"),
        pair=match.integer("pair", 1),
        element_bytes=match.need("weight").spec.dtype.bytes,
        norm=match.text("norm", "none"),
        summed=match.operand("residual") is not None,
        written=match.operand("norm_out") is not None,
    )
