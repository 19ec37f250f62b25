"""A convolution, an instance norm and a division."""

import torch
from torch import Tensor, nn

B, C, OUT, SIZE = 16, 32, 64, 64


class Model(nn.Module):
    """A convolution, an instance norm and a division."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(C, OUT, 3)
        self.norm = nn.InstanceNorm2d(OUT)

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return self.norm(self.convolution(x)) / 2.0


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, C, SIZE, SIZE)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
