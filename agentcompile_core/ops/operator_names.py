"""Names of operators as graphs spell them, in one place for all that look for them, and those whose results depend on data.

Torch's own stand here where two sides have to name the same: a graph, and the bodies that a device has for it.
"""

from ..ir.graph import Node

# Operators whose output shape depends on data, or that bring a value to the host.
DATA_DEPENDENT = frozenset({
    "nonzero", "nonzero_numpy", "item", "_local_scalar_dense", "masked_select", "unique", "_unique", "_unique2",
    "unique_dim", "unique_consecutive", "unbind_copy", "is_nonzero", "equal", "bincount", "histc", "multinomial",
})

ATTENTION, CACHED, MASKED = "agentcompile.attention.default", "agentcompile.cached.default", "agentcompile.masked.default"
RMS_NORM, LAYER_NORM = "agentcompile.rms_norm.default", "agentcompile.layer_norm.default"
ROPE, ROTARY = "agentcompile.rope.default", "agentcompile.rotary_embedding.default"
RECURRENCE, CONVOLUTION = "agentcompile.recurrence.default", "agentcompile.causal_convolution.default"
EXPERT_LINEAR, START_DECODE = "agentcompile.expert_linear.default", "agentcompile.start_decode.default"
ARGMAX, ADVANCE, ADVANCE_ROWS = "agentcompile.argmax.default", "agentcompile.advance.default", "agentcompile.advance_rows.default"

ADD, MULTIPLY, SUM, COPY = "aten.add.Tensor", "aten.mul.Tensor", "aten.sum.dim_IntList", "aten.copy_.default"
LINEAR, ATEN_LAYER_NORM = "aten.linear.default", "aten.layer_norm.default"
NORMS = (RMS_NORM, LAYER_NORM, ATEN_LAYER_NORM)
SPLITS = ("aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default", "aten.chunk.default")


def operator(node: Node) -> tuple[str, str]:
    """Name and overload of a node's operator: ``aten.add.Tensor`` gives ``("add", "Tensor")``."""
    parts = node.op.split(".")
    return (parts[1] if len(parts) > 1 else parts[0], parts[2] if len(parts) > 2 else "default")
