"""What a backend's block around the framework's own model must leave as it is."""

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..plugin.interfaces import Backend
from .demands import demand
from .tried import what_raised

if TYPE_CHECKING:
    import torch

WAIT_S = 20.0


def demand_any_length(backend: Backend) -> None:
    """Blocks of ``any_length`` overlap, in several threads too; attention in them is the framework's, and what is raised passes."""
    import torch

    found, wanted, entered = [], _attended(backend.device), threading.Event()

    def elsewhere() -> None:
        with backend.any_length():
            entered.set()
            found.append(_attended(backend.device))

    with ExitStack() as blocks:
        blocks.enter_context(backend.any_length())
        other = threading.Thread(target=elsewhere, daemon=True)
        other.start()
        demand(entered.wait(WAIT_S), "any_length() makes a second thread wait until the first one's block ends")
        other.join(WAIT_S)
        found.append(_attended(backend.device))
    for one in (*found, _attended(backend.device)):
        demand(torch.allclose(one, wanted, rtol=1e-3, atol=1e-3), "any_length() changes what the framework's attention gives")
    demand("inside" in what_raised(lambda: _raise_in(backend)), "any_length() keeps what is raised in its block; let it pass")


def _attended(device: str) -> "torch.Tensor":
    import torch

    rows = torch.linspace(-2.0, 2.0, 96, device=device).sin().reshape(1, 2, 6, 8)
    return torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True)


def _raise_in(backend: Backend) -> None:
    with backend.any_length():
        raise ValueError("inside")
