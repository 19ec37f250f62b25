"""The upper triangle of a product."""

import torch
from torch import Tensor, nn

N = 1536


class Model(nn.Module):
    """The upper triangle of a product."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """The task."""
        return torch.triu(a @ b)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(N, N), torch.randn(N, N)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
