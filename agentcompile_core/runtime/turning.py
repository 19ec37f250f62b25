"""Which rotary frequencies a session's programs turn by: those of short sequences, or of long ones (docs/decisions/0050)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ..ir.frequencies import Frequencies, near_of

if TYPE_CHECKING:
    import torch

    from .weights import WeightStore


class Reads(Protocol):
    """What reads a prompt [1, n] and stands behind it: token, position and history int64, on the device."""

    ids: "torch.Tensor"
    position: "torch.Tensor"
    history: "torch.Tensor"

    def prefill(self, prompt: "torch.Tensor", new: int = 0) -> object:
        """Read it from position 0."""


class Turning:
    """Of one session. Its programs read frequencies from one place, in which those stand that the sequence of the request has.

    They are memory of the session's weights, not of the module: HuggingFace's own model writes to its buffers, too. Sessions over the same
    weights run one after the other, so each writes them before a prompt.
    """

    def __init__(self, session: Reads, several: Sequence[Frequencies], weights: "WeightStore") -> None:
        import torch

        self._session = session
        self._limit, self._rereads = near_of(several), any(one.rereads for one in several)
        self._places = [weights.own(one.source) for one in several]
        self._near, self._far = ([torch.tensor(getattr(one, which), device=weights.device) for one in several] for which in ("near", "far"))
        self._prompt: torch.Tensor | None = None
        self._is_far = self._grown = False
        self.turn(False)

    def turn(self, far: bool) -> None:
        """From now on by the frequencies of long sequences, or of short ones."""
        self._is_far = far
        for place, numbers in zip(self._places, self._far if far else self._near, strict=True):
            place.copy_(numbers)

    def begin(self, prompt: "torch.Tensor | None") -> None:
        """Before a prompt [1, n] is read from its first token; None: somebody else has read what is cached."""
        if self._limit:
            self._prompt = prompt
            self.turn(prompt is not None and (self._grown or prompt.shape[1] > self._limit))

    def room(self, at: int) -> int:
        """How many steps from position ``at`` on need no ``step`` before them."""
        return max(0, self._limit - at) if self._limit and not self._is_far and self._prompt is not None else 1 << 62

    def step(self, at: int) -> None:
        """Before the step that reads the token at position ``at``: where it makes a short sequence a long one, read that again."""
        if self.room(at) or self._prompt is None:
            return
        if not self._rereads:
            self.turn(True)
            return
        session, length = self._session, self._prompt.shape[1]
        new = session.history[length : at + 1].clone().unsqueeze(0)
        self._grown, token = True, new[:, -1:]
        try:
            session.prefill(_joined(self._prompt, new)[:, :at])
        finally:
            self._grown = False
        session.ids.copy_(token)
        session.position.fill_(at)
        session.history[at : at + 1].copy_(token[0])


def _joined(prompt: "torch.Tensor", new: "torch.Tensor") -> "torch.Tensor":
    import torch

    return torch.cat([prompt, new.to(prompt.device)], dim=1)
