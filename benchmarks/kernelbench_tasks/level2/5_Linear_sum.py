"""A linear layer and the sum of its outputs."""

import torch
from torch import Tensor, nn

B, D, OUT = 1024, 4096, 4096


class Model(nn.Module):
    """A linear layer and the sum of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return torch.sum(self.linear(x), dim=1, keepdim=True)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, D)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
