"""Attention over the past with its projections."""

import torch
from torch import Tensor, nn
from torch.nn import functional

B, T, D, HEADS = 8, 512, 768, 12


class Model(nn.Module):
    """Attention over the past with its projections."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        b, t, d = x.shape
        q, k, v = (part.view(b, t, HEADS, d // HEADS).transpose(1, 2) for part in self.into(x).split(d, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, T, D)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
