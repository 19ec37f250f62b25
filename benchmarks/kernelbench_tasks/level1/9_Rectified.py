"""ReLU."""

import torch
from torch import Tensor, nn

ROWS, COLUMNS = 4096, 16384


class Model(nn.Module):
    """ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return torch.relu(x)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(ROWS, COLUMNS)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
