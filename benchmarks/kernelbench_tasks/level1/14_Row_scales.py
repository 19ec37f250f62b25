"""Rows times one number each: a diagonal times a matrix."""

import torch
from torch import Tensor, nn

ROWS, COLUMNS = 4096, 8192


class Model(nn.Module):
    """Rows times one number each: a diagonal times a matrix."""

    def forward(self, scales: Tensor, x: Tensor) -> Tensor:
        """The task."""
        return scales.unsqueeze(1) * x


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(ROWS), torch.randn(ROWS, COLUMNS)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
