"""A product of two square matrices."""

import torch
from torch import Tensor, nn

N = 2048


class Model(nn.Module):
    """A product of two square matrices."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """The task."""
        return a @ b


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(N, N), torch.randn(N, N)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
