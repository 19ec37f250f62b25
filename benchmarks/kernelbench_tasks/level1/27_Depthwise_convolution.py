"""A convolution of each channel on its own."""

import torch
from torch import Tensor, nn

B, C, SIZE = 16, 128, 64


class Model(nn.Module):
    """A convolution of each channel on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(C, C, 3, padding=1, groups=C)

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return self.convolution(x)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, C, SIZE, SIZE)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
