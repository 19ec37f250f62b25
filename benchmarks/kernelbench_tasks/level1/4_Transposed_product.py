"""A product with both matrices transposed."""

import torch
from torch import Tensor, nn

M, N, K = 1024, 2048, 1536


class Model(nn.Module):
    """A product with both matrices transposed."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """The task."""
        return a.t() @ b.t()


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(K, M), torch.randn(N, K)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
