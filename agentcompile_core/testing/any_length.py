"""What a backend's block around the framework's own model must leave as it is."""

from typing import TYPE_CHECKING

from ..plugin.interfaces import Backend
from .demands import demand
from .tried import what_raised

if TYPE_CHECKING:
    import torch


def demand_any_length(backend: Backend) -> None:
    """Blocks of ``any_length`` overlap as those of several threads do, attention in them is the framework's, and what is raised passes."""
    import torch

    wanted = _attended(backend.device)
    first, second = backend.any_length(), backend.any_length()
    first.__enter__()
    second.__enter__()
    inside = _attended(backend.device)
    first.__exit__(None, None, None)
    between = _attended(backend.device)
    second.__exit__(None, None, None)
    for found in (inside, between, _attended(backend.device)):
        demand(torch.allclose(found, wanted, rtol=1e-3, atol=1e-3), "any_length() changes what the framework's attention gives")
    demand("inside" in what_raised(lambda: _raise_in(backend)), "any_length() keeps what is raised in its block; let it pass")


def _attended(device: str) -> "torch.Tensor":
    import torch

    rows = torch.linspace(-2.0, 2.0, 96, device=device).sin().reshape(1, 2, 6, 8)
    return torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True)


def _raise_in(backend: Backend) -> None:
    with backend.any_length():
        raise ValueError("inside")
