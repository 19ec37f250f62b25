"""The one loop over new tokens, and the ways to look at what a step made of them."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Protocol

from ..plugin.running import SessionState
from .sampling import Pick

if TYPE_CHECKING:
    import torch

LAG = 4  # decode steps at least that are enqueued ahead of the host's look at a token, on an accelerator


class Look(Protocol):
    """How the host learns the tokens of a request. ``seen`` may lag behind the steps; ``left`` gives what it held back."""

    def seen(self, index: int) -> Iterator[int]:
        """Tokens that are known now that the logits of all tokens up to ``index`` (0: the prompt's) are enqueued."""

    def left(self) -> Iterator[int]:
        """Tokens that are known only after the last step."""

    def ends(self, token: int) -> bool:
        """Whether the request ends with ``token``, the last one given."""


def token_stream(count: int, step: Callable[[], None], look: Look) -> Generator[int, None, None]:
    """At most ``count`` tokens after a prompt that has run; ``step`` makes the logits of the next one."""

    def advance(left: int) -> int:
        step()
        return 1

    return token_groups(count, advance, look)


def token_groups(count: int, advance: Callable[[int], int], look: Look) -> Generator[int, None, None]:
    """As ``token_stream``; ``advance(left)`` makes the logits of one or more further tokens, at most ``left``, and says of how many."""
    made = 0
    while made < count:
        made += advance(count - made) if made else 1
        for token in look.seen(made - 1):
            yield token
            if look.ends(token):
                return
    for token in look.left():
        yield token
        if look.ends(token):
            return


def collected(found: Generator[int, None, None], streamer: Any) -> list[int]:
    """All tokens of a stream, each one shown to ``streamer`` as int64 [1] when it is there."""
    import torch

    new: list[int] = []
    with torch.inference_mode(), closing(found):  # also where the streamer raises: what a stream gives back, it gives back now
        for token in found:
            new.append(token)
            if streamer is not None:
                streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    return new


class AtOnce:
    """The host reads every token as it is made: where a step has run when it returns. ``start``: where the first one is in the history."""

    def __init__(self, history: "torch.Tensor", start: int, eos: frozenset[int]) -> None:
        self._history, self._start, self._eos = history, start, eos
        self._read = 0

    def seen(self, index: int) -> Iterator[int]:
        """The tokens since the last look."""
        first, self._read = self._read, index + 1
        yield from self._history[self._start + first : self._start + self._read].tolist()

    def left(self) -> Iterator[int]:
        """Nothing."""
        yield from ()

    def ends(self, token: int) -> bool:
        """By one of the tokens that end a request."""
        return token in self._eos


class Lagging:
    """The host reads tokens LAG steps or a group of steps behind the device, so the device never waits; what ran beyond the end is
    discarded. Tokens of one group land together."""

    def __init__(self, history: "torch.Tensor", start: int, count: int, eos: frozenset[int]) -> None:
        import torch

        self._history, self._start, self._eos = history, start, eos
        self._landed = torch.zeros(count, dtype=torch.int64, pin_memory=True)
        self._waiting: deque[tuple[int, int, Any]] = deque()  # from which token, to which, and when they have landed
        self._sent = 0

    def seen(self, index: int) -> Iterator[int]:
        """The tokens behind which LAG steps are enqueued."""
        import torch

        first, self._sent = self._sent, index + 1
        made = self._history[self._start + first : self._start + self._sent]
        self._landed[first : self._sent].copy_(made, non_blocking=True)
        event = torch.Event(self._history.device.type)
        event.record()
        self._waiting.append((first, self._sent, event))
        while self._sent - self._waiting[0][1] >= LAG:
            yield from self._next()

    def left(self) -> Iterator[int]:
        """The last tokens."""
        while self._waiting:
            yield from self._next()

    def _next(self) -> list[int]:
        first, end, event = self._waiting.popleft()
        event.synchronize()
        return list(self._landed[first:end].tolist())

    def ends(self, token: int) -> bool:
        """By one of the tokens that end a request; the steps enqueued beyond it run on."""
        return token in self._eos


class Afterwards:
    """Nobody looks before the last step: all tokens are read at once from the session's history."""

    def __init__(self, history: "torch.Tensor", start: int, count: int) -> None:
        self._history, self._start, self._count = history, start, count

    def seen(self, index: int) -> Iterator[int]:
        """Nothing."""
        yield from ()

    def left(self) -> Iterator[int]:
        """All tokens."""
        yield from self._history[self._start : self._start + self._count].tolist()

    def ends(self, token: int) -> bool:
        """Never before the count."""
        return False


def look_for(history: "torch.Tensor", start: int, count: int, eos: frozenset[int], watched: bool) -> Look:
    """How to look at the tokens of one request, which begin at ``start`` of the history; ``watched``: somebody waits for each one."""
    if history.device.type == "cpu":
        return AtOnce(history, start, eos)
    return Lagging(history, start, count, eos) if watched else Afterwards(history, start, count)


class Picking:
    """The host chooses each token from the logits and writes it where the next step reads it."""

    def __init__(self, pick: Pick, prompt: "torch.Tensor", count: int, session: SessionState, logits: "Callable[[], torch.Tensor]") -> None:
        import torch

        self._pick, self._session, self._logits, self._length = pick, session, logits, prompt.shape[1]
        self._ids = torch.zeros((1, self._length + count), dtype=torch.int64, device=session.ids.device)
        self._ids[:, : self._length].copy_(prompt)

    def seen(self, index: int) -> Iterator[int]:
        """The token chosen from the logits."""
        session = self._session
        token = self._pick.token(self._ids[:, : self._length], self._logits())
        self._ids[0, self._length] = token[0]
        session.ids.copy_(token.view(1, 1))
        session.history.index_copy_(0, session.position, token.view(1))
        self._length += 1
        yield int(token)

    def left(self) -> Iterator[int]:
        """Nothing."""
        yield from ()

    def ends(self, token: int) -> bool:
        """As the pick says of everything so far."""
        return bool(self._pick.stops(self._ids[:, : self._length], None).all())
