"""A gated perceptron over many rows."""

import torch
from torch import Tensor, nn
from torch.nn import functional

B, D, HIDDEN = 256, 1024, 2816


class Model(nn.Module):
    """A gated perceptron over many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, HIDDEN, bias=False)
        self.up = nn.Linear(D, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, D)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
