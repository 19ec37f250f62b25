"""Several sequences over one session: each one's keys and values are in the session's cache while it runs, and beside it otherwise.

A compiled step knows one sequence. A request for several (beams, rows of a batch) runs it for each in turn: what changes hands are the
rows of the cache behind those that two sequences share.
"""

import weakref
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...ir.frequencies import near_of
from ..holding import hold

if TYPE_CHECKING:
    import torch

    from ..session import Session

STEPS = 8  # tokens at most that decode steps read behind what is cached; more are a prompt
GROWTH = 64  # rows by which what is parked grows


class Row:
    """One sequence: ``tokens`` are read already. ``parked`` holds the first ``length`` rows of every cache, and all fixed states."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parked: list[torch.Tensor] = []
        self.states: list[torch.Tensor] = []
        self.length = 0

    def cut(self, count: int) -> None:
        """Forget the last ``count`` tokens."""
        if count:
            self.tokens = self.tokens[:-count]
            self.length = min(self.length, len(self.tokens))


class Sequences:
    """Runs rows through a session that somebody holds exclusively."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._held: list[int] = []  # the tokens whose rows the session's cache holds
        self._owner: weakref.ref[Row] = weakref.ref(Row())

    def logits(self, row: Row, more: Items[int], keep: int) -> "torch.Tensor":
        """Read ``more`` behind what ``row`` holds; logits [keep, vocabulary] behind the last ``keep`` of its tokens.

        Raises:
            UsageError: it grows beyond the context.
        """
        import torch

        session, wanted = self._session, [*row.tokens, *more]
        if len(wanted) > session.kv.capacity:
            raise UsageError(f"a sequence of {len(wanted)} tokens exceeds the context of {session.kv.capacity}; "
                             "compile with a larger context")
        if 0 < near_of(session.graphs.frequencies) < len(wanted):  # rows at their own lengths would need frequencies of their own
            raise UsageError(f"a sequence grows beyond {near_of(session.graphs.frequencies)} tokens, where all of it is turned otherwise; "
                             "compiled steps follow for one prompt of tokens alone: call generate of the compiled model")
        with torch.inference_mode():
            self._bring(row)
            have = self._shared(wanted, len(wanted) - keep)
            self._held = []  # whatever fails below leaves nothing to build on
            if have and len(wanted) - have <= STEPS:
                found, start = [], have
            else:
                start = len(wanted) - keep + 1
                found = [session.read(torch.tensor([wanted[:start]]))]
            found += [session.read_next(token, start + i) for i, token in enumerate(wanted[start:])]
        self._held, row.tokens = wanted, wanted
        return torch.stack([one.clone() for one in found[-keep:]])

    def copy(self, row: Row) -> Row:
        """Another row with the same tokens."""
        import torch

        if self._owner() is row:
            self._park(row)
        found = Row()
        found.tokens, found.length = list(row.tokens), row.length
        with torch.inference_mode():
            found.parked, found.states = [one.clone() for one in row.parked], [one.clone() for one in row.states]
        return found

    @property
    def rewinds(self) -> bool:
        """Whether tokens may be taken back: positions may be written again, states of fixed size hold all that was read."""
        return not self._session.graphs.states

    def _shared(self, wanted: list[int], most: int) -> int:
        """How many tokens of the beginning the session holds already, at most ``most``."""
        count = next((i for i, (a, b) in enumerate(zip(self._held, wanted, strict=False)) if a != b),
                     min(len(self._held), len(wanted)))
        if not self.rewinds and (count < len(self._held) or count > most):
            return 0
        return min(count, most)

    def _bring(self, row: Row) -> None:
        """Make ``row`` the one that the session's cache holds."""
        owner = self._owner()
        if owner is row:
            return
        if owner is not None:
            self._park(owner)
        self._owner = weakref.ref(row)
        if not row.length:
            return
        hold(self._session.kv, row.length)
        known = row.tokens[: row.length]
        first = self._shared(known, row.length) if self.rewinds else 0
        for place, kept in zip(self._caches(), row.parked, strict=True):
            place[:, first : row.length].copy_(kept[:, first : row.length])
        for place, kept in zip(self._states(), row.states, strict=True):
            place.copy_(kept)
        self._held = known

    def _park(self, row: Row) -> None:
        """Keep what the session's cache holds of ``row`` beside it."""
        import torch

        count = len(row.tokens)
        with torch.inference_mode():
            caches = self._caches()
            if not row.parked or row.parked[0].shape[1] < count:
                room = min(count + GROWTH, self._session.kv.capacity)
                grown = [one.new_empty((1, room, *one.shape[2:])) for one in caches]
                for new, old in zip(grown, row.parked, strict=False):
                    new[:, : row.length].copy_(old[:, : row.length])
                row.parked = grown
            for kept, place in zip(row.parked, caches, strict=True):
                kept[:, row.length : count].copy_(place[:, row.length : count])
            row.states = [one.clone() for one in self._states()]
        row.length = count

    def _caches(self) -> "list[torch.Tensor]":
        return [*self._session.kv.keys, *self._session.kv.values]

    def _states(self) -> "list[torch.Tensor]":
        states = self._session.states
        return [states[source] for source in self._session.graphs.states]
