"""GELU in its exact form."""

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS, COLUMNS = 4096, 16384


class Model(nn.Module):
    """GELU in its exact form."""

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return functional.gelu(x)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(ROWS, COLUMNS)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
