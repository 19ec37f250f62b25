"""A norm over groups of channels."""

import torch
from torch import Tensor, nn

B, C, H, W, GROUPS = 16, 64, 64, 64, 8


class Model(nn.Module):
    """A norm over groups of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, C)

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return self.norm(x)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, C, H, W)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
