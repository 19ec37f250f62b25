"""A block that mixes tokens, then channels."""

import torch
from torch import Tensor, nn

B, T, D = 16, 196, 512


class Model(nn.Module):
    """A block that mixes tokens, then channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(D), nn.LayerNorm(D)
        self.tokens = nn.Sequential(nn.Linear(T, 2 * T), nn.GELU(), nn.Linear(2 * T, T))
        self.channels = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, T, D)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
