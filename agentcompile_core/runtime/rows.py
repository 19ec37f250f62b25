"""Batches: the tokens of 2 to 8 rows by steps that read the weights once for all of them (docs/decisions/0034)."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from ..errors import UsageError, one_line
from ..ops.rows import NoRows
from ..plugin.interfaces import DecodeRuntime
from ..plugin.running import KVState
from .binder import bind
from .device import free_bytes
from .executables import Executables
from .holding import held_bytes, hold
from .program import Program
from .rows_check import difference
from .rows_program import rows_program
from .rows_state import OneRow, RowsState, RowsStep

if TYPE_CHECKING:
    import torch

    from .weights import WeightStore

log = logging.getLogger("agentcompile.rows")
SIZES = (2, 4, 8)  # rows of a step; rows that a batch does not have stand still
LOOK = 8  # steps between two looks of the host for rows that ended, on an accelerator
WORTH = 32  # tokens of each row that batches of one size have asked for before a step is made for them: that takes seconds
TIMED = 5  # steps per measurement, of which the fastest of as many counts
GAIN = 0.97  # of the time of single steps that a step of all rows may take

Tokens = list[list[int]]


class Rows:
    """Steps of several rows for one session, made when a batch first asks. ``when``: ``measured``, the default, uses them on an
    accelerator, for as many rows as they were faster for than single steps; ``always`` and ``never`` say it. ``another_kv``
    allocates a cache as the session's; None: no batch has such steps. ``notes``: why there are none, once each."""

    def __init__(self, session: OneRow, decode: Program | None, weights: "WeightStore", executables: Executables,
                 runtime: DecodeRuntime) -> None:
        self.when: Literal["measured", "always", "never"] = "measured"
        self.notes: tuple[str, ...] = ()
        self._session, self._decode, self._weights, self._executables = session, decode, weights, executables
        self._runtime = runtime
        self.another_kv: Callable[[], KVState] | None = None
        self._caches: list[KVState] = []
        self._made: dict[int, RowsStep | None] = {}
        self._asked: dict[int, int] = {}  # tokens of each row so far, by size

    @property
    def seconds(self) -> dict[int, tuple[float, float]]:
        """By number of rows: of a step of all of them, and of a single row's."""
        return {size: step.seconds for size, step in self._made.items() if step is not None and step.seconds is not None}

    def tokens(self, prompts: "Sequence[torch.Tensor]", count: int, eos: frozenset[int]) -> "list[list[int] | None]":
        """The most likely tokens behind each prompt [1, n], ``count`` at most; None: the prompt is left to single steps.

        For whoever has the right to run; every prompt fits the context with ``count`` tokens behind it.
        """
        import torch

        found: list[list[int] | None] = []
        for first in range(0, len(prompts), SIZES[-1]):
            group = prompts[first : first + SIZES[-1]]
            with torch.inference_mode():
                made = self._group(group, count, eos) if len(group) > 1 and count > 1 and self._may() else None
            found += made if made is not None else [None] * len(group)
        return found

    def _may(self) -> bool:
        if self.when == "never" or self.another_kv is None or self._decode is None:
            return False
        return self.when == "always" or self._session.device != "cpu"

    def _group(self, prompts: "Sequence[torch.Tensor]", count: int, eos: frozenset[int]) -> Tokens | None:
        size = next(one for one in SIZES if one >= len(prompts))
        self._asked[size] = self._asked.get(size, 0) + count
        if size not in self._made:
            if self.when != "always" and self._asked[size] < WORTH:
                return None
            self._made[size] = self._make(size)
        step = self._made[size]
        if step is None or not self._pays(step, len(prompts)):
            return None
        try:
            for cache, prompt in zip(step.state.caches, prompts, strict=False):
                hold(cache, prompt.shape[1] + count)
        except UsageError as exc:
            self._note(f"this batch ran row after row: {exc}")
            return None
        return _run(self._session, step, prompts, count, eos)

    def _pays(self, step: RowsStep, rows: int) -> bool:
        return self.when == "always" or (step.seconds is not None and step.seconds[0] < GAIN * rows * step.seconds[1])

    def _make(self, size: int) -> RowsStep | None:
        """A step of ``size`` rows that was compared with single steps; None, and a note, where there is none."""
        try:
            step = self._prepared(size)
            why = difference(self._session, step)
        except NoRows as exc:
            why = str(exc)
        except Exception as exc:  # whatever of it fails: single steps answer
            why = f"{type(exc).__name__}: {one_line(str(exc))}"
        if why:
            del self._caches[max((one for one, made in self._made.items() if made is not None), default=0) :]
            self._note(f"batches of this model run row after row: a step of {size} rows was not made or is not right: {why}")
            return None
        if self._session.device != "cpu":
            step.seconds = _seconds(self._session, step)
            log.info("a step of %d rows takes %.0f us, one of a single row %.0f us", size, *(1e6 * one for one in step.seconds))
        return step

    def _prepared(self, size: int) -> RowsStep:
        assert self._decode is not None and self.another_kv is not None
        program = rows_program(self._decode, size)
        self._check_room(size - len(self._caches))
        while len(self._caches) < size:
            self._caches.append(self.another_kv())
        state = RowsState(self._session, self._caches[:size])
        for cache in state.caches:
            hold(cache, 1)
        self._session.bound("decode")  # it arranges the weights
        bound = bind(program, self._weights, state.named(), {}, self._executables)
        return RowsStep(state, bound, self._runtime.prepare(bound, state))  # type: ignore[arg-type]

    def _check_room(self, caches: int) -> None:
        """Caches of rows leave half of what is free to everything else.

        Raises:
            NoRows: they would not.
        """
        import torch

        free, needed = free_bytes(torch.device(self._session.device)), caches * held_bytes(self._session.kv)
        if free is not None and needed > free // 2:
            raise NoRows(f"{caches} more KV caches take {needed / 2**30:.1f} GiB, more than half of the {free / 2**30:.1f} GiB free")

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes = (*self.notes, note)
            log.warning("%s", note)


def _run(session: OneRow, step: RowsStep, prompts: "Sequence[torch.Tensor]", count: int, eos: frozenset[int]) -> Tokens:
    state = step.state
    state.live.zero_()  # rows that no prompt has stay at position 0 of their caches
    state.positions.zero_()
    for row, prompt in enumerate(prompts):
        length = prompt.shape[1]
        session.prefill(prompt)
        for kept, read in zip(state.tensors(row), (*session.kv.keys, *session.kv.values), strict=True):
            kept[:, :length].copy_(read[:, :length])
        state.ids[:, row].copy_(session.ids[0])
        state.positions[row].fill_(length)
        state.live[row].fill_(1)
        state.history[row, length].copy_(session.ids[0, 0])
    starts, made, every = [prompt.shape[1] for prompt in prompts], 1, 1 if session.device == "cpu" else LOOK
    while made < count:
        for _ in range(min(every if eos else count, count - made)):
            step.run()
            made += 1
        if eos and all(eos.intersection(row) for row in _seen(state, starts, made)):
            break
    return [_cut(row, eos) for row in _seen(state, starts, made)]


def _seen(state: RowsState, starts: Sequence[int], made: int) -> Tokens:
    import torch

    found: Tokens = torch.stack([state.history[row, start : start + made] for row, start in enumerate(starts)]).tolist()
    return found


def _cut(tokens: list[int], eos: frozenset[int]) -> list[int]:
    """Up to the first token that ends a request."""
    end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens) - 1)
    return tokens[: end + 1]


def _seconds(session: OneRow, step: RowsStep) -> tuple[float, float]:
    """Of one step of all rows, and of one of a single row, at the first positions."""
    state, single = step.state, session.step("decode")
    for cache in (session.kv, *state.caches):
        hold(cache, TIMED + 1)

    def once(run: Callable[[], None]) -> float:
        import torch

        state.live.fill_(1)
        state.positions.zero_()
        session.position.zero_()
        torch.accelerator.synchronize()
        began = time.perf_counter()
        for _ in range(TIMED):
            run()
        torch.accelerator.synchronize()
        return (time.perf_counter() - began) / TIMED

    pairs = [(once(step.run), once(single)) for _ in range(TIMED)]
    return min(rows for rows, _ in pairs), min(one for _, one in pairs)
