"""A layer norm over the last axis."""

import torch
from torch import Tensor, nn

B, T, D = 32, 512, 1536


class Model(nn.Module):
    """A layer norm over the last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return self.norm(x)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, T, D)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
