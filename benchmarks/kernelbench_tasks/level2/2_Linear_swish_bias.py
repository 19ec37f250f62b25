"""A linear layer, swish and a bias."""

import torch
from torch import Tensor, nn

B, D, OUT = 1024, 1024, 4096


class Model(nn.Module):
    """A linear layer, swish and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, OUT)
        self.bias = nn.Parameter(torch.randn(OUT))

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        y = self.linear(x)
        return torch.sigmoid(y) * y + self.bias


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, D)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
