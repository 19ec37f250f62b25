"""The activations of gates that the kernels know, by the operator that a graph calls and what it says beside its argument."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    import torch

SILU, GELU, RELU = "aten.silu.default", "aten.gelu.default", "aten.relu.default"
ACTIVATIONS = (SILU, GELU, RELU)


@frozen
class Gate:
    """An activation. ``number``: of ``gate_...`` in activation.cuh."""

    name: str
    number: int

    def run(self, x: "torch.Tensor") -> "torch.Tensor":
        """The framework's own."""
        from torch.nn import functional

        found: dict[str, Callable[..., torch.Tensor]] = {
            "silu": functional.silu, "gelu": functional.gelu, "gelu_tanh": partial(functional.gelu, approximate="tanh"),
            "relu": functional.relu}
        return found[self.name](x)


GATES = tuple(Gate(name, number) for number, name in enumerate(("silu", "gelu", "gelu_tanh", "relu")))
LIKELY = {SILU: GATES[0], GELU: GATES[2], RELU: GATES[3]}  # that of most models, before it is known what the operator is told
_BY_CALL = {(SILU, None): GATES[0], (GELU, None): GATES[1], (GELU, "none"): GATES[1], (GELU, "tanh"): GATES[2], (RELU, None): GATES[3]}


def gate_of(activation: str, how: Mapping[str, Any]) -> Gate | None:
    """The gate of an operator and its arguments by name; None: the kernels know none."""
    return None if how.keys() - {"approximate"} else _BY_CALL.get((activation, how.get("approximate")))
