"""The normalized kind of each operator: the word that region rules match."""

from ...ir.graph import TensorSpec

# Operators whose result always shares memory with their first operand and that only compute a new shape.
_ALIASING = frozenset({
    "view", "transpose", "permute", "unsqueeze", "squeeze", "expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind",
    "t", "alias", "narrow", "detach", "unflatten", "view_as", "expand_as", "movedim", "unfold", "numpy_T", "mT", "lift_fresh", "swapaxes",
})
# Operators that alias where the layout allows it and copy otherwise.
_PERHAPS_ALIASING = frozenset({"reshape", "flatten", "contiguous"})
_RENAMED = {
    "to": "cast", "_to_copy": "cast", "type_as": "cast", "clone": "copy", "softmax": "softmax", "_softmax": "softmax",
    "multiply": "mul", "divide": "div", "concat": "cat", "bitwise_not": "not", "logical_not": "not",
}


def op_name(op: str) -> str:
    """``aten.add.Tensor`` -> ``add``."""
    return op.split(".")[1]


def kind_of(op: str, operand: TensorSpec | None) -> str:
    """The kind of the overload ``op`` whose first tensor operand has the spec ``operand``.

    ``view`` is every operator that moves no bytes; ``copy`` those that only move them.
    """
    name = op_name(op)
    if name in _ALIASING:
        return "view"
    if name in _PERHAPS_ALIASING:
        return "view" if operand is None or not operand.strides else "copy"
    return _RENAMED.get(name, name)
