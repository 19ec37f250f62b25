"""Names of operators, and those whose results depend on data."""

from ..ir.graph import Node

# Operators whose output shape depends on data, or that bring a value to the host.
DATA_DEPENDENT = frozenset({
    "nonzero", "nonzero_numpy", "item", "_local_scalar_dense", "masked_select", "unique", "_unique", "_unique2",
    "unique_dim", "unique_consecutive", "unbind_copy", "is_nonzero", "equal", "bincount", "histc", "multinomial",
})


ATTENTION, CACHED = "agentcompile.attention.default", "agentcompile.cached.default"
RMS_NORM, ROPE = "agentcompile.rms_norm.default", "agentcompile.rope.default"
NORMS = (RMS_NORM, "agentcompile.layer_norm.default", "aten.layer_norm.default")
SPLITS = ("aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default", "aten.chunk.default")
RECURRENCE, CONVOLUTION = "agentcompile.recurrence.default", "agentcompile.causal_convolution.default"


def operator(node: Node) -> tuple[str, str]:
    """Name and overload of a node's operator: ``aten.add.Tensor`` gives ``("add", "Tensor")``."""
    parts = node.op.split(".")
    return (parts[1] if len(parts) > 1 else parts[0], parts[2] if len(parts) > 2 else "default")
