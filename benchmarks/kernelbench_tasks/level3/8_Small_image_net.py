"""Convolutions, pools and linear layers over small images."""

import torch
from torch import Tensor, nn

B, CLASSES = 128, 10


class Model(nn.Module):
    """Convolutions, pools and linear layers over small images."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return self.head(self.features(x).flatten(1))


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, 1, 28, 28)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
