"""A convolution, ReLU and a bias per channel."""

import torch
from torch import Tensor, nn

B, C, OUT, SIZE = 16, 32, 64, 96


class Model(nn.Module):
    """A convolution, ReLU and a bias per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(C, OUT, 3)
        self.bias = nn.Parameter(torch.randn(OUT, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return torch.relu(self.convolution(x)) + self.bias


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, C, SIZE, SIZE)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
