"""The kind of attention over all rows at once: operands in any steps, masks by which every row sees something."""

import torch
from torch import Tensor

from agentcompile_core.plugin_api import (
    READS,
    AttributeKind,
    Case,
    DType,
    Graph,
    Match,
    MatchKind,
    Operand,
    OperandKind,
    Role,
    SemanticLabel,
    kind_names,
)

HIDDEN = 0.3  # share of the places that a drawn mask hides
_READ = tuple((name, axis) for name in ("q", "k", "v", "mask") for axis in ("offset", "batch", "head", "row", "column"))


class MaskedAttention(MatchKind):
    """Work by what is multiplied; masks are drawn so that no row is hidden from everything."""

    def flops(self, match: Match, graph: Graph) -> int:
        """Two multiply-adds per channel, query head, row and key; half of them where rows see no later keys."""
        pairs = match.integer("batch") * match.integer("heads") * match.integer("rows") * match.integer("keys")
        return 2 * pairs * (match.integer("head_dim") + match.integer("value_dim")) // (2 if match.flag("causal") else 1)

    def bytes_moved(self, match: Match, graph: Graph) -> int:
        """Each element that is read or written once, whatever it lies in."""
        batch, heads, kv_heads, rows, keys, width, wide = (
            match.integer(name) for name in ("batch", "heads", "kv_heads", "rows", "keys", "head_dim", "value_dim"))
        elements = batch * (heads * rows * (width + wide) + kv_heads * keys * (width + wide))
        mask = match.operand("mask")
        return elements * match.need("q").spec.dtype.bytes + (mask.spec.nbytes if mask is not None else 0)

    def reduction_axis(self, match: Match, graph: Graph) -> int:
        """The keys', of scores [.., rows, keys]."""
        return -1

    def make(self, match: Match, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor | None:
        """A mask of what is seen, in which every row sees the first key; one that is the same for all keys hides some rows."""
        if operand.name != "mask" or operand.spec.dtype is not DType.BOOL:
            return None
        seen = torch.rand(operand.spec.shape, generator=generator, device=device) >= HIDDEN
        seen[..., 0] |= operand.spec.shape[-1] > 1
        return seen


MASKED_ATTENTION = MaskedAttention(
    name=kind_names.MASKED_ATTENTION, labels=(SemanticLabel.ATTENTION,),
    doc="out[b, h, i] = sum_j softmax_j(q[b, h, i] k[b, g, j] * scale + mask[b, h, i, j]) v[b, g, j], g = h / (heads / kv_heads);"
        " causal: j <= i; steps in elements, 0 where a value is repeated; the last step of q, k, v and out is 1",
    operands=(OperandKind("q", READS), OperandKind("k", READS), OperandKind("v", READS),
              OperandKind("mask", READS, optional=True, doc="bool: what is seen; float: added to the scores"),
              OperandKind("out", (Role.OUTPUT,))),
    attributes=(
        *(AttributeKind(name) for name in ("batch", "heads", "kv_heads", "rows", "keys", "head_dim", "value_dim")),
        AttributeKind("scale", float), AttributeKind("causal", bool, False), AttributeKind("mask", str, "none", doc="none, seen or added"),
        *(AttributeKind(f"{name}_{axis}", int, 0, doc="first element" if axis == "offset" else f"a step of the {axis}")
          for name, axis in _READ),
        *(AttributeKind(f"out_{axis}", doc=f"a step of the {axis}") for axis in ("batch", "head", "row")),
    ),
)
