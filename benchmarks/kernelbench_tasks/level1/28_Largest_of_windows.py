"""Max pooling."""

import torch
from torch import Tensor, nn

B, C, SIZE = 16, 64, 128


class Model(nn.Module):
    """Max pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return self.pool(x)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, C, SIZE, SIZE)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
