"""Values for a whole step that is only timed: weights, states and inputs of a graph, made where its match kinds make them."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from ..ir.graph import Graph, Value, ValueKind
from ..ir.region import Match, Operand, Region, Role
from ..ir.verdict import Case, InputFamily
from ..ops.dtypes import torch_dtype
from ..plugin.match_kind import MatchKind, OperandKind

GROWTH = 1 << 16  # elements behind a state that grows at every timed run
SMALL = 0.02  # of weights and activations, so that nothing overflows through all layers


class Step(Protocol):
    """What is asked about: a graph, its regions with their matches, and the position it runs at."""

    @property
    def graph(self) -> Graph:
        """The step."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """Its regions."""

    @property
    def position(self) -> int:
        """Where it is judged."""


class Synthetic:
    """Makes the values of one step on ``device``. Seeds are fixed."""

    def __init__(self, step: Step, kinds: Mapping[str, MatchKind], device: str) -> None:
        self.graph, self.kinds, self.device = step.graph, kinds, device
        self.case = Case(family=InputFamily.NORMAL, seed=0, position=step.position)
        self._read: dict[str, list[tuple[Match, Operand]]] = {}
        for value, match, operand in _operands(step.regions):
            self._read.setdefault(value, []).append((match, operand))

    def tensors(self, kinds: tuple[ValueKind, ...], by_source: bool) -> dict[str, Tensor]:
        """Tensors of all values of some kinds, by source or by name."""
        torch.manual_seed(0)
        return {(v.source if by_source else v.name): self._make(v) for v in self.graph.values if v.kind in kinds}

    def _make(self, value: Value) -> Tensor:
        dtype, shape = torch_dtype(value.spec.dtype), value.spec.shape
        readers = self._read.get(value.name, [])
        if not value.spec.dtype.is_float:
            grows = any(said is not None and said.grows for said in (self._said(match, operand) for match, operand in readers))
            return torch.zeros((shape[0] + GROWTH, *shape[1:]) if grows else shape, dtype=dtype, device=self.device)
        for match, operand in readers if value.kind is not ValueKind.STATE else ():
            made = self._made(match, operand)
            if made is not None:
                return made.to(dtype).reshape(shape)
        if value.kind is ValueKind.WEIGHT and len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=self.device)
        return torch.randn(shape, dtype=dtype, device=self.device).mul_(SMALL)

    def _made(self, match: Match, operand: Operand) -> Tensor | None:
        kind = self.kinds.get(match.kind)
        if kind is None or len(operand.values) != 1:
            return None
        generator = torch.Generator(device=self.device)
        generator.manual_seed(0)
        try:
            made = kind.make(match, operand, self.case, generator, self.device)
        except (Exception, SystemExit):  # a defect of the kind fails its candidates; timing a step only needs some values
            return None
        return made if made is not None and made.numel() == operand.spec.numel else None

    def _said(self, match: Match, operand: Operand) -> OperandKind | None:
        kind = self.kinds.get(match.kind)
        return kind.operand(operand.name) if kind is not None else None


def _operands(regions: tuple[Region, ...]) -> Iterator[tuple[str, Match, Operand]]:
    """Values of the graph that matches read, each with the match and its operand."""
    for region in regions:
        for match in region.matches:
            for operand in match.operands:
                if operand.role is not Role.OUTPUT:
                    for instance in region.instances:
                        yield from ((instance.value.get(v, v), match, operand) for v in operand.values)
