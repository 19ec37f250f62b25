"""Einsum over the last axis of four."""

import torch
from torch import Tensor, nn

B, R, J, L, K = 4, 64, 96, 256, 384


class Model(nn.Module):
    """Einsum over the last axis of four."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """The task."""
        return torch.einsum("bijl,lk->bijk", a, b)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, R, J, L), torch.randn(L, K)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
