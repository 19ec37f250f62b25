"""Inputs of products of matrices under which a sum kept in half precision shows (see ``sums``), wherever the factors lie."""

import torch
from torch import Tensor

from agentcompile_core.plugin_api import Case, Match, Operand

from .sums import LARGE, SHARES, SMALL, WEIGHED, half_step, large_and_small, seeded


def _axes(match: Match, name: str) -> tuple[list[int], list[int]]:
    """Extents and steps of a factor: outer, inner, then its rows and columns; an axis that it lacks has one element."""
    rows, columns = ("m", "k") if name == "a" else ("k", "n")
    steps = [match.integer(f"{name}_{step}") for step in ("outer", "inner", "row", "column")]
    extents = [match.integer(extent) for extent in ("outer", "inner", rows, columns)]
    return [extent if step else 1 for extent, step in zip(extents, steps, strict=True)], steps


def extent(match: Match, name: str) -> int:
    """How many elements of a factor are read."""
    found = 1
    for each in _axes(match, name)[0]:
        found *= each
    return found


def part_read(match: Match, operand: Operand) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """What ``MatchKind.part_read`` asks: of a factor the elements of its products; None for what is no factor."""
    if operand.name not in ("a", "b"):
        return None
    extents, steps = _axes(match, operand.name)
    return match.integer(f"{operand.name}_offset"), tuple(extents), tuple(steps)


def swamped(match: Match, operand: Operand, case: Case, device: str) -> Tensor | None:
    """Factor a has one row over and over; b has, for each column, products with it that are large or lie below half a step.

    None for what is no factor: as the core draws it.
    """
    if operand.name not in ("a", "b"):
        return None
    k, n = match.integer("k"), match.integer("n")
    small = SMALL * half_step(operand)
    row = _signed(large_and_small((k,), SHARES[1], small, seeded(case, 1, device), device).sqrt(), case, device)
    if operand.name == "a":
        return _laid(match, operand, row[None, :].expand(match.integer("m"), k), device)
    wanted = large_and_small((n, k), SHARES[1], small, seeded(case, 2, device), device)
    return _laid(match, operand, (WEIGHED * wanted / row).t(), device)


def _signed(magnitudes: Tensor, case: Case, device: str) -> Tensor:
    drawn = torch.rand(magnitudes.shape, generator=seeded(case, 3, device), device=device)
    return torch.where(drawn < 0.5, -magnitudes, magnitudes)


def _laid(match: Match, operand: Operand, matrix: Tensor, device: str) -> Tensor:
    """The factor's memory with ``matrix`` in every product of the batch; what is not read is as large as its large terms."""
    extents, steps = _axes(match, operand.name)
    held = torch.full((operand.spec.numel,), LARGE, device=device)
    place = held.as_strided(extents, steps, match.integer(f"{operand.name}_offset"))
    place.copy_(matrix[: extents[2], : extents[3]].expand(extents))
    return held.view(operand.spec.shape)
