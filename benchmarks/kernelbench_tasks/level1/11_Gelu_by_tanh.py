"""GELU written out by a hyperbolic tangent."""

import torch
from torch import Tensor, nn

ROWS, COLUMNS = 4096, 16384
SCALE = 0.7978845608028654


class Model(nn.Module):
    """GELU written out by a hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return 0.5 * x * (1.0 + torch.tanh(SCALE * (x + 0.044715 * x * x * x)))


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(ROWS, COLUMNS)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
