"""The tokens of a session's requests: its steps, each behind the token that was chosen from what the last one made (``token_loop``)."""

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Protocol

from ..plugin.running import SessionState
from .bound_program import BoundProgram
from .device_choice import DeviceChoices
from .preparing import DecodePrograms
from .sampling import Draw, Pick
from .token_loop import Picking, look_for, token_groups, token_stream
from .turning import Turning

if TYPE_CHECKING:
    import torch

    Read = Callable[[torch.Tensor, int], BoundProgram]  # (prompt [1, n], new tokens): stands behind it as ``Session.prefill`` does
    Tokens = Generator[int, None, None]


class Steps(SessionState, Protocol):
    """The session whose steps these are; see there."""

    steps_per_graph: int

    def prefill(self, prompt: "torch.Tensor", new: int = 0) -> BoundProgram:
        """Read a prompt from position 0."""

    def bound(self, name: str) -> BoundProgram:
        """A program by its name."""

    def decode_program(self, position: int) -> str:
        """Name of the one whose step reads the token at ``position``."""

    def run_step(self, position: int) -> str:
        """Run that step; the name."""

    def steps_at_once(self, name: str, steps: int) -> Callable[[], None] | None:
        """What makes several of them together."""


class TokenMaker:
    """Of one session. ``at`` is the host's own position: of the token that the next step reads."""

    def __init__(self, session: Steps, draw: Draw | None, turning: Turning, decoding: DecodePrograms) -> None:
        self._session, self._turning, self._decoding = session, turning, decoding
        self._choices = DeviceChoices(session, draw)
        self._last: BoundProgram | None = None  # the program that ran last
        self.at = 0

    def greedy(self, prompt: "torch.Tensor", count: int, eos: frozenset[int], watched: bool, read: "Read | None" = None) -> "Tokens":
        """See ``Session.greedy``."""
        session = self._session
        self._begin(prompt, count, read)
        last, token = self.at - 1, 0
        try:
            for token in token_groups(count, self._advance_by, look_for(session.history, prompt.shape[1], count, eos, watched)):
                last += 1
                yield token
        finally:
            if prompt.shape[1] <= last < self.at:
                session.ids.fill_(token)
                session.position.fill_(last)
                self.at = last

    def picking(self, prompt: "torch.Tensor", count: int, pick: Pick, watched: bool, read: "Read | None" = None) -> "Tokens":
        """See ``Session.picking``."""
        self._last = self._begin(prompt, count, read)
        if pick.alone is not None:
            look = look_for(self._session.history, prompt.shape[1], count, pick.alone.eos, watched or bool(pick.alone.eos))
            yield from self._choices.begin(pick, pick.alone, prompt).tokens(count, self._advance, look, self._logits)
        else:
            yield from token_stream(count, self._advance, Picking(pick, prompt, count, self._session, self._logits))

    def _begin(self, prompt: "torch.Tensor", count: int, read: "Read | None") -> BoundProgram:
        self.at = prompt.shape[1]
        return (read or self._session.prefill)(prompt, count)

    def _advance(self) -> None:
        self._turning.step(self.at)
        self._last = self._session.bound(self._session.run_step(self.at))
        self.at += 1

    def _advance_by(self, left: int) -> int:
        """Make steps whose tokens the device chooses, at most ``left``; how many. All of them in one program, for a graph holds one."""
        session, steps = self._session, self._session.steps_per_graph
        room = min(left, self._decoding.end(self.at) - self.at, self._turning.room(self.at))
        several = session.steps_at_once(session.decode_program(self.at), steps) if 1 < steps <= room else None
        if several is None:
            self._advance()
            return 1
        several()
        self.at += steps
        return steps

    def _logits(self) -> "torch.Tensor":
        """Logits [vocabulary] behind the last position, of the program that ran last."""
        assert self._last is not None
        return self._last.output(0)[0, -1]
