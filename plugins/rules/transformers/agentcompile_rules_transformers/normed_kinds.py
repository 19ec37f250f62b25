"""The kinds of what is around a norm: linear layers of one token, and norms of rows. ``T`` is the element type of the model."""

import torch
from torch import Tensor

from agentcompile_core.plugin_api import (
    READS,
    WEIGHTS,
    AttributeKind,
    Case,
    DType,
    Match,
    MatchKind,
    Operand,
    OperandKind,
    Role,
    SemanticLabel,
    kind_names,
)

from . import sums

L = SemanticLabel
OUT = (Role.OUTPUT,)
NORM_ATTRIBUTES = (
    AttributeKind("norm", str, doc="none, rms, rms_one_plus, rms_once, layer or layer_one_plus"), AttributeKind("norm_eps", float),
)


class Normed(MatchKind):
    """A kind with weights of a norm: around 1, or around 0 where the norm adds 1 itself."""

    def weight_scale(self, match: Match, operand: Operand) -> tuple[float, float]:
        """Of norm weights as trained ones have it."""
        norm_weights = ("weight", "weight_beside") if self.name == kind_names.NORM else ("norm_weight", "post_weight", "q_norm", "k_norm")
        if operand.name not in norm_weights:
            return super().weight_scale(match, operand)
        norm = match.text("post_norm" if operand.name == "post_weight" else "norm", "none")
        return (0.0 if norm.endswith("one_plus") else 1.0), 0.1

    def lasting_families(self, match: Match) -> tuple[str, ...]:
        """Sums whose small terms are lost where they are kept in half precision."""
        layer = self.name == kind_names.NORM and match.text("norm", "none").startswith("layer")
        narrow = self.name == kind_names.LINEAR and match.need("x").spec.dtype is DType.BF16
        found = (sums.SWAMPED, *[sums.SWAMPED_MEAN] * layer, *[sums.SWAMPED_HALF] * narrow)
        return found if match.need("x").spec.dtype in sums.NARROW else ()

    def make(self, match: Match, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor | None:
        """Rows and weights of those sums."""
        return sums.of_row(match, operand, case, device) if case.family in sums.FAMILIES else None


LINEAR = Normed(
    name=kind_names.LINEAR, version=6, labels=(L.GEMV, L.NORM_GEMV, L.QKV_PROJECTION, L.GATED_MLP),
    doc="y = epilogue(acc, aux), acc[p][i] = sum_k weight[p*n + i, k] * prologue(x)[k];"
        " epilogue over acc0 (acc1 if pair is 2), aux0, aux1; none: acc0",
    operands=(
        OperandKind("x", READS, doc="[.., k] T, or f32, rounded to T behind the norm"),
        OperandKind("weight", WEIGHTS, doc="[pair*n, k] T; several values: concatenated rows"),
        OperandKind("norm_weight", WEIGHTS, optional=True, doc="[k], of the prologue"),
        OperandKind("norm_bias", WEIGHTS, optional=True, doc="[k], of the prologue"),
        OperandKind("aux", READS, repeated=True, doc="a bias [n] or a residual [.., n]"),
        OperandKind("out", OUT, doc="[.., n]; several values: side by side"),
        OperandKind("norm_out", OUT, optional=True, doc="[.., k] T: norm(x), where others read it as well"),
        OperandKind("residual", READS, optional=True, doc="[.., k] T: then the prologue is that of residual + post_norm(x)"),
        OperandKind("post_weight", WEIGHTS, optional=True, doc="[k], of post_norm"),
        OperandKind("residual_out", OUT, optional=True, doc="[.., k] T: residual + post_norm(x), where others read it"),
    ),
    attributes=(AttributeKind("n"), AttributeKind("k"), AttributeKind("pair", int, 1, doc="2: gate rows, then up rows"), *NORM_ATTRIBUTES,
                AttributeKind("post_norm", str, "none", doc="none, rms, rms_one_plus or rms_once"), AttributeKind("post_eps", float, 0.0)),
)
NORM = Normed(
    name=kind_names.NORM, version=4, labels=(L.NORM, L.RESIDUAL_NORM),
    doc="out = epilogue(norm(x [+ residual]), aux) of each row; element (row, column) has weight (row % groups) * (columns / span)"
        " + column / span; epilogue over acc0, the norm in the type of x, aux0, aux1; none: acc0. Where there is x_beside: of its rows"
        " as well",
    operands=(
        OperandKind("x", READS, doc="[.., columns]"), OperandKind("residual", READS, optional=True, doc="[.., columns]"),
        OperandKind("weight", WEIGHTS, optional=True, doc="[groups * columns / span], of any type where nothing is rounded before it"),
        OperandKind("bias", WEIGHTS, optional=True, doc="[groups * columns / span]"),
        OperandKind("aux", READS, repeated=True, doc="[.., columns]"),
        OperandKind("x_beside", READS, optional=True, doc="[.., columns_beside]: rows of another value, of the same norm"),
        OperandKind("weight_beside", WEIGHTS, optional=True, doc="[columns_beside]"),
        OperandKind("out_beside", OUT, optional=True),
        OperandKind("out", OUT), OperandKind("residual_out", OUT, optional=True, doc="x + residual, where others read it"),
    ),
    attributes=(AttributeKind("rows"), AttributeKind("columns"), *NORM_ATTRIBUTES,
                AttributeKind("rows_beside", int, 0), AttributeKind("columns_beside", int, 0),
                AttributeKind("groups", int, 1, doc="rows with weights of their own"),
                AttributeKind("span", int, 1, doc="neighbours in a row that share a weight: the places of a channel")),
)
