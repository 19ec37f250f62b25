"""A linear layer, a layer norm and GELU."""

import torch
from torch import Tensor, nn
from torch.nn import functional

B, D, OUT = 2048, 1024, 3072


class Model(nn.Module):
    """A linear layer, a layer norm and GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, OUT)
        self.norm = nn.LayerNorm(OUT)

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return functional.gelu(self.norm(self.linear(x)))


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, D)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
