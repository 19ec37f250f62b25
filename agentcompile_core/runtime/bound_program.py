"""A program with addresses: what runs, in pieces that a graph may or may not hold."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ..ir.graph import Graph
from .moving import Moving
from .program import Program, Segment

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class Piece:
    """One bound segment, or several neighbours of one kind: ``run`` enqueues it on the current stream.

    ``capturable``: whether a captured graph may hold it; what may not runs from Python, between the graphs on its two sides.
    ``closing``: whether only the last chunk of a prompt needs it, since it leaves nothing that a later one reads.
    """

    run: Callable[[], None]
    capturable: bool = True
    closing: bool = False
    names: tuple[str, ...] = ()


class BoundProgram:
    """A program with addresses. ``run`` enqueues all of it on the current stream.

    ``moving``: puts inputs and results where a call has them; None where they stay where they were bound. ``segments``: what was bound, in
    order; of one token each is one of ``parts``.
    """

    def __init__(self, program: Program, parts: Sequence[Piece], environment: "dict[str, torch.Tensor]", keep: list[Any],
                 arena: "torch.Tensor | None" = None, moving: Moving | None = None, segments: Sequence[Segment] = ()) -> None:
        self.program, self.moving, self.segments = program, moving, tuple(segments)
        self._arena = arena
        self.environment = environment
        self._parts = tuple(parts)
        self._keep = keep

    @property
    def graph(self) -> Graph:
        """What it computes."""
        return self.program.graph

    @property
    def parts(self) -> tuple[Piece, ...]:
        """What ``run`` runs."""
        return self._parts

    def run(self) -> None:
        """Run every segment once."""
        for part in self._parts:
            part.run()

    def poison(self, byte: int = 0xFF) -> None:
        """Fill every planned buffer with bytes of ones, NaN to every float type: what a run does not write is seen behind it."""
        if self._arena is not None:
            self._arena.fill_(byte)

    @property
    def arena_address(self) -> int:
        """Where the memory begins that all planned buffers share."""
        return self._arena.untyped_storage().data_ptr() if self._arena is not None else 0

    @property
    def uncapturable(self) -> tuple[str, ...]:
        """Names of the segments that no captured graph may hold."""
        return tuple(name for part in self._parts if not part.capturable for name in part.names)

    def pieces(self) -> tuple[Piece, ...]:
        """The program in as few pieces as can be, in order: each one wholly capturable, or wholly not, and closing or not."""
        groups: list[list[Piece]] = []
        for part in self._parts:
            if not groups or (groups[-1][0].capturable, groups[-1][0].closing) != (part.capturable, part.closing):
                groups.append([])
            groups[-1].append(part)
        return tuple(_joined(group) for group in groups)

    def output(self, index: int) -> "torch.Tensor":
        """Tensor of one graph output, valid after ``run``."""
        return self.environment[self.program.graph.outputs[index]]


def _joined(parts: list[Piece]) -> Piece:
    runs = tuple(part.run for part in parts)

    def run() -> None:
        for one in runs:
            one()

    first, names = parts[0], tuple(name for part in parts for name in part.names)
    return Piece(run=run, capturable=first.capturable, closing=first.closing, names=names)
