"""A product of matrices whose sizes no tile divides."""

import torch
from torch import Tensor, nn

M, N, K = 1021, 1531, 2053


class Model(nn.Module):
    """A product of matrices whose sizes no tile divides."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """The task."""
        return a @ b


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(M, K), torch.randn(K, N)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
