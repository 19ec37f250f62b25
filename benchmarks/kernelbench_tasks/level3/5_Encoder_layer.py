"""One layer of a transformer's encoder, norms first."""

import torch
from torch import Tensor, nn

B, T, D, HEADS = 8, 256, 512, 8


class Model(nn.Module):
    """One layer of a transformer's encoder, norms first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(D, HEADS, 4 * D, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The task."""
        return self.layer(x)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, T, D)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
