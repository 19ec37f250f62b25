"""A leaky ReLU, bounded on both sides."""

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS, COLUMNS = 4096, 16384


class Model(nn.Module):
    """A leaky ReLU, bounded on both sides."""

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return torch.clamp(functional.leaky_relu(x, 0.05), -0.5, 3.0)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(ROWS, COLUMNS)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
