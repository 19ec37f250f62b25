"""A matrix times one vector."""

import torch
from torch import Tensor, nn

M, K = 8192, 16384


class Model(nn.Module):
    """A matrix times one vector."""

    def forward(self, a: Tensor, x: Tensor) -> Tensor:
        """The task."""
        return a @ x


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(M, K), torch.randn(K, 1)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
