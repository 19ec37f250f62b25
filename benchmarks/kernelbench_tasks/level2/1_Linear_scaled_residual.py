"""A linear layer, scaled, plus its input."""

import torch
from torch import Tensor, nn

B, D = 1024, 2048


class Model(nn.Module):
    """A linear layer, scaled, plus its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return 0.5 * self.linear(x) + x


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, D)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
