"""Inputs from results: which elements of one operand make what a kernel computes before it reduces come out as wanted."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import torch
from attrs import frozen
from torch import Tensor

from agentcompile_core.plugin_api import Expression, Match, evaluate

FARTHEST = 2.0**20  # of what is searched
HALVINGS = 60
OFF = 2.0**-10  # of a result and of 1: what elements of 16 bits miss anyway
NEUTRAL = (0.0, 1.0)  # of what is added or masks, and of what scales


@frozen(kw_only=True)
class Solution:
    """``elements``: those of operand ``name`` that give the wanted results while the others hold ``constants``, by name."""

    name: str
    elements: tuple[float, ...]
    constants: tuple[tuple[str, float], ...]

    def results(self, match: Match, dtype: torch.dtype) -> Tensor:
        """What the elements give once they are stored as ``dtype``; float64."""
        values = {name: torch.tensor(value, dtype=torch.float64) for name, value in self.constants}
        return evaluate(match.epilogue, {self.name: torch.tensor(self.elements, dtype=dtype).double(), **values})


def solved(match: Match, wanted: tuple[float, ...]) -> Solution | None:
    """How the expression of ``match`` gives each of the ``wanted`` results; None where nothing that is tried does.

    One operand that is not repeated is searched, by halving, where the expression is monotone; all others hold one constant each.
    """
    count = match.integer("outer") * match.integer("columns") * match.integer("inner", 1)
    reads = tuple(operand for operand in match.operands if operand.name.startswith("in") and operand.name != "indices")
    whole = tuple(operand.name for operand in reads if operand.spec.numel == count)
    return _solved(match.epilogue, tuple(operand.name for operand in reads), whole, wanted)


@lru_cache(maxsize=64)
def _solved(expression: Expression | None, names: tuple[str, ...], whole: tuple[str, ...], wanted: tuple[float, ...]) -> Solution | None:
    if expression is None or not expression.operations:
        return Solution(name=names[0], elements=wanted, constants=())
    goal = torch.tensor(wanted, dtype=torch.float64)
    for name, constants, low, high in _tries(names, whole):
        values = {other: torch.tensor(value, dtype=torch.float64) for other, value in constants}
        found = _halved(expression, name, values, goal, low, high)
        if found is not None:
            return Solution(name=name, elements=tuple(found.tolist()), constants=constants)
    return None


def _tries(names: tuple[str, ...], whole: tuple[str, ...]) -> Iterator[tuple[str, tuple[tuple[str, float], ...], float, float]]:
    for low, high in ((-FARTHEST, FARTHEST), (0.0, FARTHEST), (-FARTHEST, 0.0)):
        for name in whole:
            others = tuple(other for other in names if other != name)
            for values in product(NEUTRAL, repeat=len(others)):
                yield name, tuple(zip(others, values, strict=True)), low, high


def _halved(expression: Expression, name: str, values: dict[str, Tensor], goal: Tensor, low: float, high: float) -> Tensor | None:
    below, above = torch.full_like(goal, low), torch.full_like(goal, high)
    ends = evaluate(expression, {name: torch.tensor([low, high], dtype=torch.float64), **values}).expand(2)
    rising = bool(ends[1] > ends[0])
    for _ in range(HALVINGS):
        middle = (below + above) / 2
        short = (evaluate(expression, {name: middle, **values}) < goal) == rising
        below, above = torch.where(short, middle, below), torch.where(short, above, middle)
    off = (evaluate(expression, {name: above, **values}) - goal).abs()
    return above if bool((off <= OFF * (1.0 + goal.abs())).all()) else None
