"""What a step of several rows changes, and what it asks of the session of one row beside it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..ir.graph import GraphSet
from ..ops.rows import HISTORY, IDS, LIVE, OFFSETS, POSITION, cache_of
from ..plugin.running import KVState, SessionState
from .bound_program import BoundProgram

if TYPE_CHECKING:
    import torch


class OneRow(SessionState, Protocol):
    """A session, of which the caller has the right to run a request."""

    graphs: GraphSet
    device: str

    @property
    def max_context(self) -> int:
        """Longest prompt plus generation, in tokens."""

    def bound(self, name: str) -> BoundProgram:
        """The bound program of the graph called ``name``."""

    def step(self, name: str) -> Callable[[], None]:
        """What makes one step of the program called ``name`` where ids and position stand."""

    def decode_program(self, position: int) -> str:
        """Name of the program whose step reads the token at ``position``."""

    def prefill(self, prompt: "torch.Tensor", new: int = 0) -> BoundProgram:
        """Run a prompt [1, n]; then ids, position and history stand at the first token behind it."""

    def read_next(self, token: int, position: int, program: str = "") -> "torch.Tensor":
        """Read one token at ``position``; logits [vocabulary] behind it."""


class RowsState:
    """What a step of ``size`` rows changes, as a decode runtime sees a session: ids [1, B], position, history [B, S], and caches."""

    def __init__(self, session: "OneRow", caches: Sequence[KVState]) -> None:
        import torch

        size, device = len(caches), session.device
        self._session, self.caches = session, tuple(caches)
        self.ids: torch.Tensor = torch.zeros((1, size), dtype=torch.int64, device=device)
        self.positions: torch.Tensor = torch.zeros(size, dtype=torch.int64, device=device)
        self.position: torch.Tensor = torch.zeros(1, dtype=torch.int64, device=device)  # warm-ups begin at 0 in each row
        self.history: torch.Tensor = torch.zeros((size, session.history.shape[0]), dtype=torch.int64, device=device)
        self.live: torch.Tensor = torch.ones(size, dtype=torch.int64, device=device)
        self.offsets: torch.Tensor = torch.zeros(size, dtype=torch.int64, device=device)  # rows are tokens alone
        self.kv = caches[0]

    @property
    def generation(self) -> int:
        """How often a cache of its rows moved."""
        return sum(int(getattr(cache, "generation", 0)) for cache in self.caches)

    @property
    def capture(self) -> "Callable[..., Any]":
        """Of the session: one stream and one pool for all."""
        return self._session.capture

    def named(self) -> "dict[str, torch.Tensor]":
        """Tensors by source."""
        found = {IDS: self.ids, POSITION: self.positions, HISTORY: self.history, LIVE: self.live, OFFSETS: self.offsets}
        for row, cache in enumerate(self.caches):
            for i, (key, value) in enumerate(zip(cache.keys, cache.values, strict=True)):
                found[cache_of(row, f"kv.key.{i}")], found[cache_of(row, f"kv.value.{i}")] = key, value
        return found

    def tensors(self, row: int) -> "tuple[torch.Tensor, ...]":
        """K and V of all layers of a row."""
        return (*self.caches[row].keys, *self.caches[row].values)


class RowsStep:
    """A step of ``state``'s rows, bound and captured; ``seconds``: of one step of all rows and of one of a single row, where measured."""

    def __init__(self, state: RowsState, bound: BoundProgram, run: Callable[[], None]) -> None:
        self.state, self.bound, self.run = state, bound, run
        self.seconds: tuple[float, float] | None = None
