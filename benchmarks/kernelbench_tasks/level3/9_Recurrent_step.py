"""One step of a recurrent cell: joined input and state, tanh, output."""

import torch
from torch import Tensor, nn

B, D, HIDDEN, OUT = 256, 512, 1024, 256


class Model(nn.Module):
    """One step of a recurrent cell: joined input and state, tanh, output."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Linear(D + HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, OUT)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        """The task."""
        hidden = torch.tanh(self.state(torch.cat((x, state), dim=1)))
        return self.out(hidden)


def get_inputs() -> list[Tensor]:
    """Random ones."""
    return [torch.randn(B, D), torch.randn(B, HIDDEN)]


def get_init_inputs() -> list[object]:
    """What Model is made with."""
    return []
