"""Batches: the tokens of 2 to 8 rows by steps that read the weights once for all of them (docs/decisions/0034)."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import UsageError, one_line
from ..ops.rows import NoRows
from ..plugin.interfaces import DecodeRuntime
from ..plugin.running import KVState
from .binder import bind
from .device import free_bytes, release_cache
from .executables import Executables
from .holding import AHEAD, give_back, held, hold
from .program import Program
from .rows_check import difference, furthest
from .rows_choice import RowsChoice
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
SHORT = 3  # times that memory may run out while a step of a size is made or runs
GAIN = 0.97  # of the time of single steps that a step of all rows may take

Tokens = list[list[int]]
Key = tuple[int, str]  # rows of a step, and the program of a single row's that it was derived from


class NoRoom(Exception):
    """Why memory does not suffice for rows at present, in one clause."""


class Rows(RowsChoice):
    """Steps of several rows for one session, made when batches have asked for enough.

    ``another_kv`` allocates a cache as the session's; None: no batch has such steps. ``notes``: why there are none, once each.
    """

    def __init__(self, session: OneRow, decode: Program | None, weights: "WeightStore", executables: Executables,
                 runtime: DecodeRuntime) -> None:
        super().__init__()
        self._session, self._weights, self._executables, self._runtime = session, weights, executables, runtime
        self._has_step = decode is not None
        self.another_kv: Callable[[], KVState] | None = None
        self._caches: list[KVState] = []
        self._made: dict[Key, RowsStep | None] = {}
        self._asked: Counter[Key] = Counter()  # tokens of each row so far
        self._short: Counter[Key] = Counter()  # how often memory did not suffice while one was made or ran

    @property
    def seconds(self) -> dict[Key, tuple[float, float]]:
        """By number of rows and program of the step: of a step of all of them, and of a single row's."""
        return {key: step.seconds for key, step in self._made.items() if step is not None and step.seconds is not None}

    def hold(self, positions: int) -> None:
        """Make the first ``positions`` of the session's cache memory; what rows hold is given back first where that does not suffice.

        Raises:
            UsageError: there is not enough memory; nothing that the session holds has changed then.
        """
        try:
            hold(self._session.kv, positions)
        except UsageError:
            if not self._caches:
                raise
            self.give_back()
            hold(self._session.kv, positions)

    def give_back(self) -> None:
        """Give back what caches of rows hold, where they can."""
        for cache in self._caches:
            give_back(cache, 1)

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
        if self.when == "never" or self.another_kv is None or not self._has_step:
            return False
        return self.when == "always" or self._session.device != "cpu"

    def _group(self, prompts: "Sequence[torch.Tensor]", count: int, eos: frozenset[int]) -> Tokens | None:
        """The tokens of each; None, and a note, where that is left to single steps for whatever reason."""
        size = next(one for one in SIZES if one >= len(prompts))
        lengths = [prompt.shape[1] for prompt in prompts]
        key = size, self._session.decode_program(sum(lengths) // len(lengths) + count // 2)
        self._asked[key] += count
        if key not in self._made and self.when != "always" and self._asked[key] < WORTH:
            return None
        ends = [*(length + count for length in lengths), *[1] * (size - len(lengths))]
        try:
            step = self._step(key, ends)
            if step is None or not self._pays(step, len(prompts)):
                return None
            return _run(self._session, step, prompts, count, eos)
        except (Exception, SystemExit) as exc:  # single rows answer, from their prompts on
            self._failed(key, exc)
            return None

    def _pays(self, step: RowsStep, rows: int) -> bool:
        return self.when == "always" or (step.seconds is not None and step.seconds[0] < GAIN * rows * step.seconds[1])

    def _step(self, key: Key, ends: list[int]) -> RowsStep | None:
        """A step that was compared with single steps, and caches that hold ``ends`` positions of its rows; None: there is none.

        Raises:
            NoRoom: memory does not suffice at present.
            NoRows: there is no such step.
            Exception: whatever making one raises.
        """
        if key in self._made:
            if self._made[key] is not None:
                self._make_room(ends)
            return self._made[key]
        size, name = key
        program = self._session.bound(name).program  # it arranges the weights
        tried = max(furthest(size), program.start + TIMED + 1)
        self._make_room([max(end, tried) for end in ends])
        step = self._prepared(program, size)
        why = difference(self._session, step)
        if why:
            raise NoRows(why)
        if self._session.device != "cpu":
            step.seconds = _seconds(self._session, step, name, program.start)
            log.info("a step of %d rows takes %.0f us, one of a single row %.0f us", size, *(1e6 * one for one in step.seconds))
        self._made[key] = step
        return step

    def _prepared(self, program: Program, size: int) -> RowsStep:
        state = RowsState(self._session, self._caches[:size])
        bound = bind(rows_program(program, size), self._weights, state.named(), {}, self._executables)
        return RowsStep(state, bound, self._runtime.prepare(bound, state))  # type: ignore[arg-type]

    def _make_room(self, ends: list[int]) -> None:
        """Have a cache for each row, which holds that many positions; half of what is free is left to everything else.

        Raises:
            NoRoom: it would not be, or there is less than that.
        """
        import torch

        assert self.another_kv is not None
        device, needed = torch.device(self._session.device), self._growth_bytes(ends)
        free = free_bytes(device)
        if free is not None and needed > free // 2:
            release_cache()
            free = free_bytes(device)
        if free is not None and needed > free // 2:
            raise NoRoom(f"{len(ends)} KV caches need {needed / 2**30:.2f} GiB more, over half of the {free / 2**30:.2f} GiB free")
        try:
            while len(self._caches) < len(ends):
                self._caches.append(self.another_kv())
            for cache, end in zip(self._caches, ends, strict=False):
                hold(cache, end)
        except UsageError as exc:
            raise NoRoom(str(exc)) from exc
        left = free_bytes(device) if needed else free
        if free is not None and left is not None and left < free // 2:  # a cache took all of its capacity, or pieces are large
            raise NoRoom(f"{len(ends)} KV caches took {(free - left) / 2**30:.2f} GiB, over half of the {free / 2**30:.2f} GiB free")

    def _growth_bytes(self, ends: list[int]) -> int:
        """What caches of rows must take beyond what they hold."""
        kv = self._session.kv
        row_bytes = sum(tensor.nbytes for tensor in (*kv.keys, *kv.values)) // kv.capacity
        there = [held(cache) for cache in self._caches] + [0] * (len(ends) - len(self._caches))
        wanted = [min(end + AHEAD, kv.capacity) for end in ends]
        if not hasattr(kv, "hold"):
            wanted = [kv.capacity] * len(ends)
        return row_bytes * sum(max(0, one - other) for one, other in zip(wanted, there, strict=False))

    def _failed(self, key: Key, exc: BaseException) -> None:
        """Leave batches of that size to single rows: for good, or, where memory did not suffice, this one."""
        import torch

        size, _ = key
        is_short = isinstance(exc, NoRoom | torch.OutOfMemoryError)
        why = str(exc) if isinstance(exc, NoRoom | NoRows) else f"{type(exc).__name__}: {one_line(str(exc))}"
        if is_short:
            self._short[key] += not isinstance(exc, NoRoom)
            log.info("a batch of up to %d rows ran row after row: %s", size, why)
            why = "memory did not suffice for the KV caches of all rows beside everything else"
            self._note(f"some batches of up to {size} rows ran row after row: {why}")
        else:
            self._note(f"batches of up to {size} rows run row after row: a step of {size} rows was not made or is not right: {why}")
        if not is_short or self._short[key] >= SHORT:
            self._made[key] = None
        del self._caches[max((rows for (rows, _), made in self._made.items() if made is not None), default=0) :]
        self.give_back()

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


def _seconds(session: OneRow, step: RowsStep, name: str, start: int) -> tuple[float, float]:
    """Of one step of all rows, and of one of a single row by the program called ``name``, at its first positions."""
    state, single = step.state, session.step(name)
    hold(session.kv, start + TIMED + 1)

    def once(run: Callable[[], None]) -> float:
        import torch

        state.live.fill_(1)
        state.positions.fill_(start)
        session.position.fill_(start)
        torch.accelerator.synchronize()
        began = time.perf_counter()
        for _ in range(TIMED):
            run()
        torch.accelerator.synchronize()
        return (time.perf_counter() - began) / TIMED

    pairs = [(once(step.run), once(single)) for _ in range(TIMED)]
    return min(rows for rows, _ in pairs), min(one for _, one in pairs)
