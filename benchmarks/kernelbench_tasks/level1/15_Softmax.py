"""Softmax along rows."""

import torch
from torch import Tensor, nn

ROWS, COLUMNS = 2048, 16384


class Model(nn.Module):
    """Softmax along rows."""

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return torch.softmax(x, dim=1)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(ROWS, COLUMNS)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
