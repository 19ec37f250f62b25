"""The mean of squared differences, one number."""

import torch
from torch import Tensor, nn

ROWS, COLUMNS = 4096, 8192


class Model(nn.Module):
    """The mean of squared differences, one number."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The task."""
        return torch.mean((x - y) ** 2)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
