"""Attention written out: products, a mask, softmax."""

import torch
from torch import Tensor, nn

B, HEADS, T, D = 8, 12, 256, 64


class Model(nn.Module):
    """Attention written out: products, a mask, softmax."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The task."""
        scores = q @ k.transpose(-2, -1) / D**0.5
        mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
        return torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ v


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, HEADS, T, D), torch.randn(B, HEADS, T, D), torch.randn(B, HEADS, T, D)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
