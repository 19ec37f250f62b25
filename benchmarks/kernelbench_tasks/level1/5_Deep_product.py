"""A product that is small outside and deep inside."""

import torch
from torch import Tensor, nn

M, N, K = 192, 192, 65536


class Model(nn.Module):
    """A product that is small outside and deep inside."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """The task."""
        return a @ b


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(M, K), torch.randn(K, N)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
