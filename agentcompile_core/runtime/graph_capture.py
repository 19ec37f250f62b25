"""How a program is recorded, the same for everybody who does: in pieces, where no graph may hold some of it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ..errors import Reject
from ..plugin.running import RunnablePiece, RunnableProgram


class Capture(Protocol):
    """``Backend.capture`` for one owner."""

    def __call__(self, run: Callable[[], None], *, warm_ups: int = 0, runs: int = 1) -> Callable[[], None] | Reject:
        """Record ``runs`` runs behind ``warm_ups`` calls; returns what replays them."""


class Steps:
    """What makes ``runs`` runs of a program, part by part: the first ``opening`` parts are all that a chunk needs which others follow."""

    def __init__(self, parts: Sequence[Callable[[], None]], runs: int, opening: int) -> None:
        self._parts, self._runs, self._opening = tuple(parts), runs, tuple(parts[:opening])

    def __call__(self) -> None:
        """All of it, ``runs`` times."""
        for _ in range(self._runs):
            for part in self._parts:
                part()

    def opening(self) -> None:
        """Once, without what only the last chunk of a prompt needs."""
        for part in self._opening:
            part()


def record_program(bound: RunnableProgram, capture: Capture, *, warm_ups: int, runs: int = 1) -> Callable[[], None] | Reject:
    """Capture what can be captured, leave the rest as it is; the result makes ``runs`` runs of all of it, in order.

    The pieces that are not captured run from Python at every call, between the graphs on their two sides, and not while those
    are captured. A Reject is that of the first piece that should be capturable and is not. Where the program has closing pieces, the
    result has a method ``opening``, which makes one run without them.
    """
    pieces = bound.pieces()
    if len(pieces) == 1 and pieces[0].capturable:
        return capture(pieces[0].run, warm_ups=warm_ups, runs=runs)
    for _ in range(warm_ups):  # the whole program, since a piece reads what the one before it has left
        bound.run()
    parts: list[Callable[[], None]] = []
    for piece in pieces:
        part = capture(piece.run) if piece.capturable else piece.run
        if isinstance(part, Reject):
            return part
        parts.append(part)
    return stepped(pieces, parts, runs)


def stepped(pieces: Sequence[RunnablePiece], parts: Sequence[Callable[[], None]], runs: int) -> Callable[[], None]:
    """What calls ``parts`` in order, ``runs`` times; each is what runs one of ``pieces``."""
    opening = next((index for index, piece in enumerate(pieces) if getattr(piece, "closing", False)), len(parts))
    return parts[0] if len(parts) == runs == opening == 1 else Steps(parts, runs, opening)
