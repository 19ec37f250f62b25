"""A sum along the middle axis."""

import torch
from torch import Tensor, nn

B, R, J = 64, 1024, 1023


class Model(nn.Module):
    """A sum along the middle axis."""

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return torch.sum(x, dim=1, keepdim=True)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, R, J)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
