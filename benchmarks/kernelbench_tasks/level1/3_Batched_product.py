"""A product of two batches of matrices."""

import torch
from torch import Tensor, nn

BATCH, M, N, K = 32, 256, 512, 384


class Model(nn.Module):
    """A product of two batches of matrices."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """The task."""
        return torch.bmm(a, b)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(BATCH, M, K), torch.randn(BATCH, K, N)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
