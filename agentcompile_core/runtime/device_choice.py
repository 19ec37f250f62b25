"""Choosing tokens on the device behind the steps that make their logits, so that no step waits for the host to see a token."""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING

from ..errors import Reject, UsageError
from ..plugin.running import SessionState
from .device import random_state, set_random_state
from .sampling import Pick
from .token_loop import LAG, Look, token_stream

if TYPE_CHECKING:
    import torch

KEPT = 4  # captured choices of a session: settings that a caller alternates between
MOVES = 2  # times that logits lay elsewhere than at the capture; then they move with every step, which nobody captured either
WARM_UPS = 2


class DeviceChoices:
    """Of one session: the choices it has captured, by what they depend on."""

    def __init__(self, session: SessionState) -> None:
        import torch

        self._session = session
        self._captured: OrderedDict[Hashable, tuple[int, Callable[[], None] | Reject]] = OrderedDict()
        self._moves = 0
        self._tokens: torch.Tensor | None = None
        self._refused: torch.Tensor = torch.zeros(1, dtype=torch.bool, device=session.ids.device)

    def begin(self, pick: Pick, prompt: "torch.Tensor", logits: "torch.Tensor") -> "DeviceChoice | None":
        """For one request behind ``prompt`` [1, n] whose steps leave logits [vocabulary] in ``logits``; None: the host has to choose.

        A choice that cannot be captured waits for the host somewhere, so the host may as well make it.
        """
        import torch

        if pick.alone is None:
            return None
        session, alone = self._session, pick.alone
        if self._tokens is None and alone.of_tokens:
            self._tokens = torch.zeros((1, session.history.shape[0]), dtype=torch.int64, device=session.ids.device)
        tokens = self._tokens if alone.of_tokens else None

        def choose(logits: "torch.Tensor") -> None:
            token, refused = pick.token_unseen(session.ids if tokens is None else tokens, logits)
            session.ids.copy_(token.view(1, 1))
            session.history.index_copy_(0, session.position, token.view(1))
            if tokens is not None:
                tokens.index_copy_(1, session.position, token.view(1, 1))
            self._refused.logical_or_(refused)

        address = logits.data_ptr()
        captured = self._kept((alone.settings, pick.do_sample, session.generation), address, lambda: choose(logits))
        if isinstance(captured, Reject):
            return None
        self._refused.zero_()
        if tokens is not None:  # behind the prompt stands one of its tokens: which ones there were is all that counts
            tokens.fill_(int(prompt[0, 0]))
            tokens[:, : prompt.shape[1]].copy_(prompt)
        return DeviceChoice(choose, captured, address, self._refused, draws=pick.do_sample)

    def _kept(self, key: Hashable, address: int, run: Callable[[], None]) -> Callable[[], None] | Reject:
        """What replays ``run``, captured where the logits are at ``address``; ``run`` itself where they never stay."""
        was, captured = self._captured.get(key, (address, None))
        if was != address:
            self._moves += 1
        if self._moves >= MOVES:
            return run
        if captured is None or was != address:
            captured = self._capture(run)
        self._captured[key] = address, captured
        self._captured.move_to_end(key)
        while len(self._captured) > KEPT:
            self._captured.popitem(last=False)
        return captured

    def _capture(self, run: Callable[[], None]) -> Callable[[], None] | Reject:
        """Warm-ups write where the first token will be written, and draw; the random numbers are as before."""
        session = self._session
        before, ids = random_state(session.ids.device), session.ids.clone()
        try:
            return session.capture(run, warm_ups=WARM_UPS)
        finally:
            session.ids.copy_(ids)
            set_random_state(session.ids.device, before)


class DeviceChoice:
    """The choices of one request: replayed behind the steps whose logits lie where they were captured, made from Python behind others."""

    def __init__(self, choose: "Callable[[torch.Tensor], None]", replay: Callable[[], None], address: int, refused: "torch.Tensor", *,
                 draws: bool) -> None:
        self._choose, self._replay, self._address, self._refused = choose, replay, address, refused
        self._states: deque[torch.Tensor] | None = deque(maxlen=LAG + 2) if draws else None
        self._made = 0

    def tokens(self, count: int, step: Callable[[], None], look: Look, logits: "Callable[[], torch.Tensor]") -> Iterator[int]:
        """At most ``count`` tokens; ``step`` makes the next logits, ``logits`` says where the last ones are.

        What ran beyond the last token that was taken leaves no trace in torch's random numbers.

        Raises:
            UsageError: the probabilities of some token were no numbers, negative or all zero, as torch.multinomial refuses them.
        """
        def advance() -> None:
            step()
            self._next(logits())

        self._next(logits())
        given = 0
        try:
            for token in token_stream(count, advance, look):
                given += 1
                yield token
        finally:
            self._give_back(self._made - given)
        if bool(self._refused):
            raise UsageError("the probabilities of a token contain inf, NaN or numbers below 0, or are all 0: the model's logits or the "
                             "processors of the request made them; see remove_invalid_values of generation_config")

    def _next(self, logits: "torch.Tensor") -> None:
        if self._states is not None:
            self._states.append(random_state(logits.device))
        self._made += 1
        if logits.data_ptr() == self._address:
            self._replay()
        else:
            self._choose(logits)

    def _give_back(self, draws: int) -> None:
        if draws > 0 and self._states is not None:
            set_random_state(self._refused.device, self._states[-draws])
