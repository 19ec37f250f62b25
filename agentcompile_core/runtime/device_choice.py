"""Choosing tokens on the device behind the steps that make their logits, so that no step waits for the host to see a token."""

from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable
from functools import partial
from typing import TYPE_CHECKING

from attrs import frozen

from ..errors import Reject, UsageError
from ..plugin.running import SessionState
from .device import random_state, set_random_state
from .sampling import Alone, Draw, Pick
from .token_loop import LAG, Look, token_stream

if TYPE_CHECKING:
    import torch

KEPT = 4  # settings of a session whose captured choices are kept: those that a caller alternates between
PLACES = 8  # where logits lie, at the most: each program leaves them in a place of its own; where steps are not captured they never stay
WARM_UPS = 2
NONE = (1 << 63) - 1  # behind every position


@frozen
class Recorded:
    """A captured choice, and what its graph reads: the processors of the request that captured it, and the logits."""

    replay: Callable[[], None]
    pick: Pick
    logits: "torch.Tensor"


Captured = dict[int, Recorded | None]  # by the address of the logits; None: chosen from Python


class DeviceChoices:
    """Of one session: the choices it has captured, by what they depend on."""

    def __init__(self, session: SessionState, draw: Draw | None = None) -> None:
        import torch

        self._session, self._draw = session, draw
        self._captured: OrderedDict[tuple[Hashable, bool, int], Captured] = OrderedDict()
        self._tokens: torch.Tensor | None = None
        self._refused: torch.Tensor = torch.full((1,), NONE, dtype=torch.int64, device=session.ids.device)

    def begin(self, pick: Pick, alone: Alone, prompt: "torch.Tensor") -> "DeviceChoice":
        """For one request behind ``prompt`` [1, n]."""
        import torch

        session = self._session
        if self._tokens is None and alone.of_tokens:
            self._tokens = torch.zeros((1, session.history.shape[0]), dtype=torch.int64, device=session.ids.device)
        tokens = self._tokens if alone.of_tokens else None
        if tokens is not None:  # behind the prompt stands one of its tokens: which ones there were is all that counts
            tokens.fill_(int(prompt[0, 0]))
            tokens[:, : prompt.shape[1]].copy_(prompt)
        self._refused.fill_(NONE)
        for key in [key for key in self._captured if key[-1] != session.generation]:
            del self._captured[key]  # the caches have moved, and the logits with them
        key = (alone.settings, pick.do_sample, session.generation)
        captured = self._captured.setdefault(key, {})
        self._captured.move_to_end(key)
        while len(self._captured) > KEPT:
            self._captured.popitem(last=False)
        return DeviceChoice(pick, session, prompt.shape[1], tokens, self._refused, captured, self._draw)


@frozen(kw_only=True, eq=False)
class _Choice:
    """One choice, from logits. Whoever records it keeps it, so it knows nothing of what is recorded: that would be a circle."""

    pick: Pick
    session: SessionState
    tokens: "torch.Tensor | None"
    refused: "torch.Tensor"
    draw: Draw | None

    def __call__(self, logits: "torch.Tensor") -> None:
        """The token becomes the session's, and one of the history."""
        import torch

        session = self.session
        token, refused = self.pick.token_unseen(session.ids if self.tokens is None else self.tokens, logits, self.draw)
        session.ids.copy_(token.view(1, 1))
        session.history.index_copy_(0, session.position, token.view(1))
        if self.tokens is not None:
            self.tokens.index_copy_(1, session.position, token.view(1, 1))
        torch.minimum(self.refused, torch.where(refused, session.position, self.refused), out=self.refused)


class DeviceChoice:
    """The choices of one request. The first one, behind a prompt, is made from Python; those behind steps are captured once and replayed.

    ``tokens`` int64 [1, positions]: where processors find which tokens there were, None: they do not ask. ``refused`` int64 [1]: the
    position of the first token that could not be chosen, NONE: there is none.
    """

    def __init__(self, pick: Pick, session: SessionState, length: int, tokens: "torch.Tensor | None", refused: "torch.Tensor",
                 captured: Captured, draw: Draw | None) -> None:
        self._pick, self._session, self._length = pick, session, length
        self._tokens, self._refused, self._captured = tokens, refused, captured
        self._choose = _Choice(pick=pick, session=session, tokens=tokens, refused=refused, draw=draw)
        self._before: torch.Tensor | None = random_state(refused.device) if pick.do_sample else None
        self._states: deque[torch.Tensor] = deque(maxlen=LAG + 2)  # before each of the last draws
        self._made = 0

    def tokens(self, count: int, step: Callable[[], None], look: Look,
               logits: "Callable[[], torch.Tensor]") -> Generator[int, None, None]:
        """At most ``count`` tokens; ``step`` makes the next logits, ``logits`` says where the last ones are.

        What ran beyond the last token that was taken leaves no trace in torch's random numbers, however the request ends.

        Raises:
            UsageError: the probabilities of a token were no numbers, negative or all zero, as torch.multinomial refuses them.
        """
        def advance() -> None:
            step()
            self._next(logits(), replayed=True)

        given = 0
        try:
            self._next(logits(), replayed=False)
            for token in token_stream(count, advance, look):
                given += 1
                yield token
        finally:
            self._give_back(self._made - given)
        if int(self._refused) < self._length + given:
            raise UsageError("the probabilities of a token contain inf, NaN or numbers below 0, or are all 0: the model's logits or the "
                             "processors of the request made them; see remove_invalid_values of generation_config")

    def _next(self, logits: "torch.Tensor", replayed: bool) -> None:
        if self._before is not None:
            self._states.append(random_state(logits.device))
        self._made += 1
        recorded = self._recorded(logits) if replayed else None
        if recorded is not None:
            recorded.replay()
        else:
            self._choose(logits)

    def _recorded(self, logits: "torch.Tensor") -> Recorded | None:
        """What replays the choice from logits that lie there; captured where steps leave them, as long as that is in a few places."""
        address = logits.data_ptr()
        if address not in self._captured:
            if len(self._captured) >= PLACES:
                return None
            self._captured[address] = self._capture(logits)
        return self._captured[address]

    def _capture(self, logits: "torch.Tensor") -> Recorded | None:
        """Warm-ups choose, and draw; everything they write but the history of tokens, which is written again, is as before."""
        session = self._session
        written = [session.ids, self._refused, *([] if self._tokens is None else [self._tokens])]
        state, before = random_state(logits.device), [tensor.clone() for tensor in written]
        try:
            found = session.capture(partial(self._choose, logits), warm_ups=WARM_UPS)
        finally:
            for tensor, was in zip(written, before, strict=True):
                tensor.copy_(was)
            set_random_state(logits.device, state)
        return None if isinstance(found, Reject) else Recorded(found, self._pick, logits)

    def _give_back(self, draws: int) -> None:
        """Stand before the last ``draws`` draws; more than the host may be behind are all of them: the request failed, or was left."""
        if draws > 0 and self._before is not None:
            set_random_state(self._refused.device, self._states[-draws] if draws <= len(self._states) else self._before)
