"""A transposed convolution, a bound and the mean of each image."""

import torch
from torch import Tensor, nn

B, C, OUT, SIZE = 8, 32, 64, 32


class Model(nn.Module):
    """A transposed convolution, a bound and the mean of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.ConvTranspose2d(C, OUT, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        y = torch.clamp(self.convolution(x), -1.0, 1.0)
        return torch.mean(y, dim=(2, 3))


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, C, SIZE, SIZE)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
