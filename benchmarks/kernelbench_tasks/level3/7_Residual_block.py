"""Two convolutions with batch norms and a shortcut."""

import torch
from torch import Tensor, nn

B, C, SIZE = 16, 64, 56


class Model(nn.Module):
    """Two convolutions with batch norms and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(C, C, 3, padding=1, bias=False), nn.Conv2d(C, C, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(C), nn.BatchNorm2d(C)])

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + x)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, C, SIZE, SIZE)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
