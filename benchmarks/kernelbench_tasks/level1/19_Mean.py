"""The mean along the last axis."""

import torch
from torch import Tensor, nn

B, R, J = 64, 512, 2048


class Model(nn.Module):
    """The mean along the last axis."""

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return torch.mean(x, dim=-1)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, R, J)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
