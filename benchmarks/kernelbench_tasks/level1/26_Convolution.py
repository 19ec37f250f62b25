"""A convolution of images."""

import torch
from torch import Tensor, nn

B, C, OUT, SIZE = 16, 64, 128, 64


class Model(nn.Module):
    """A convolution of images."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(C, OUT, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return self.convolution(x)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, C, SIZE, SIZE)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
