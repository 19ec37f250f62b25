"""A linear layer, mish, and rows over their sums of sizes."""

import torch
from torch import Tensor, nn
from torch.nn import functional

B, D, OUT = 1024, 1024, 2048


class Model(nn.Module):
    """A linear layer, mish, and rows over their sums of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        y = functional.mish(self.linear(x))
        return y / torch.sum(torch.abs(y), dim=1, keepdim=True)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, D)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
