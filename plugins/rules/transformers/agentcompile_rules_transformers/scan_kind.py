"""The kind of running sums and products."""

import torch
from torch import Tensor

from agentcompile_core.plugin_api import READS, SCAN, AttributeKind, Case, Match, MatchKind, Operand, OperandKind, Role

from . import row_sums


class Scan(MatchKind):
    """Running sums and products: inputs as of whole ones, whose last results these are."""

    def lasting_families(self, match: Match) -> tuple[str, ...]:
        """Sums whose small terms are lost where they are kept in half precision."""
        return row_sums.families(match)

    def make(self, match: Match, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor | None:
        """Elements of those sums; factors around 1 of either sign, for a product without anything before it."""
        if case.family in row_sums.families(match):
            return row_sums.of_rows(match, operand, case, device)
        return row_sums.factors(match, operand, case, generator, device)


SCANS = Scan(
    name=SCAN,
    doc="out[o, c, i] = op of epilogue(in0, in1, ...) at [o, 0 .. c, i] of [outer, columns, inner], or at c .. columns - 1 where reverse;"
        " element i reads element i modulo its size of every input",
    operands=(OperandKind("in", READS, repeated=True, doc="elements; what is computed with them, repeated along the leading axes"),
              OperandKind("out", (Role.OUTPUT,), doc="[outer, columns, inner]")),
    attributes=(AttributeKind("outer"), AttributeKind("columns"), AttributeKind("inner", int, 1),
                AttributeKind("op", str, doc="sum or prod"), AttributeKind("reverse", bool, False, doc="from the end of the axis on")),
)
