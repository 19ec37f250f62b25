"""Three linear layers and ReLU, one row."""

import torch
from torch import Tensor, nn

D, HIDDEN, OUT = 1024, 4096, 1000


class Model(nn.Module):
    """Three linear layers and ReLU, one row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(D, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT))

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return self.layers(x)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(1, D)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
