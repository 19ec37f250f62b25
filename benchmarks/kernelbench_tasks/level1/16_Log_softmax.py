"""The logarithm of softmax along rows that no vector divides."""

import torch
from torch import Tensor, nn

ROWS, COLUMNS = 1024, 32003


class Model(nn.Module):
    """The logarithm of softmax along rows that no vector divides."""

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return torch.log_softmax(x, dim=1)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(ROWS, COLUMNS)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
