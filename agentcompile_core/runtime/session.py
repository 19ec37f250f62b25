"""The owner of everything that changes: KV cache, position, tokens, captured graphs, the lock. One request at a time."""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import proxy

from attrs import evolve

from ..errors import Reject, UsageError
from ..ir.candidate import Kernel
from ..ir.graph import Graph, GraphKind, GraphSet
from ..ops.dtypes import zeros
from ..plugin.events import Observer, Preparing, silent
from ..plugin.interfaces import DecodeRuntime
from ..plugin.running import KVState
from .as_captured import as_captured
from .binder import bind
from .bound_program import BoundProgram
from .chunks import Chunk, ChunkInputs, cost_of_each, plan_chunks, rows_of
from .device import release_cache
from .executables import Executables
from .holding import give_back
from .live import HostPosition
from .module_changes import read_token
from .preparing import DecodePrograms, capture_each, chunk_sizes
from .program import Program
from .prompts import check_length, prompt_of
from .rows import Rows
from .sampling import Pick
from .several_steps import SeveralSteps
from .token_loop import collected
from .token_maker import TokenMaker
from .trailing import Trailing
from .turning import Turning

if TYPE_CHECKING:
    import torch

    from ..plugin.interfaces import Backend
    from .token_maker import Read, Tokens
    from .weights import WeightStore


class Session:
    """Runs requests over bound programs. States of fixed size are its own: allocated here, zero before a prompt.

    ``programs`` maps names to programs (``decode``, ``decode_from_<position>``, ``prefill_<T>``, ``prefill_<T>_fresh``); each decode
    program serves the steps from its first position to that of the next. State tensors keep their addresses while ``generation`` stays.
    ``steps_per_graph``: greedy steps that are replayed together where the decode runtime captures several at once; 1: each step is
    replayed alone. It may be set between two requests.
    """

    def __init__(self, graphs: GraphSet, programs: Mapping[str, Program], weights: "WeightStore", executables: Executables, *,
                 kv_state: KVState, decode: DecodeRuntime, steps_per_graph: int = 1) -> None:
        import torch

        self.graphs, self.kv, self._each = graphs, kv_state, cost_of_each(graphs)
        device = executables.device
        self.device, self._lock = device, threading.Lock()
        self._programs, self._weights, self._decode, self._executables = dict(programs), weights, decode, executables
        self.ids: torch.Tensor = torch.zeros((1, 1), dtype=torch.int64, device=device)
        self.position: torch.Tensor = torch.zeros((1,), dtype=torch.int64, device=device)
        count = next((v.spec.shape[0] for g in graphs.graphs for v in g.values if v.source == "session.history"), kv_state.capacity + 1)
        self.history: torch.Tensor = torch.zeros((count,), dtype=torch.int64, device=device)
        self._kept: dict[str, torch.Tensor] = {source: zeros(spec, device) for source, spec in graphs.zeroed.items()}
        self._bound, self._steps = dict[str, BoundProgram](), dict[str, Callable[[], None]]()
        self._several, self.steps_per_graph = SeveralSteps(decode), steps_per_graph
        # Parts know it by a proxy: in a circle it would keep a device's memory, when it is gone, until somebody collects garbage.
        self.rows = Rows(proxy(self), self._programs.get("decode"), weights, executables, decode)
        self._prefill_inputs = dict[int, ChunkInputs]()
        self._live = HostPosition() if executables.prefill == "live" else None
        self._decoding = DecodePrograms(self._programs, kv_state.capacity)
        self._trailing, self._turning = Trailing(self.position.device), Turning(proxy(self), graphs.frequencies, weights)
        draw = executables.backend.draw if executables.backend is not None else None
        self._tokens = TokenMaker(proxy(self), draw, self._turning, self._decoding)
        self.padding: str | None = None  # why padded prompts are not its own, or ""; None: the model was not asked yet
        self.agreed: set[Hashable] = set()  # kinds of prompts that others read and behind which its steps were seen to be the model's own

    @property
    def max_context(self) -> int:
        """Longest prompt plus generation, in tokens."""
        return self.graphs.workload.max_context

    @property
    def generation(self) -> int:
        """How often the KV cache has moved, which makes captured graphs void; 0 for a cache that never moves."""
        return int(getattr(self.kv, "generation", 0))

    @property
    def states(self) -> "dict[str, torch.Tensor]":
        """State tensors by source."""
        cached = {f"kv.{part}.{i}": one for part, all_ in (("key", self.kv.keys), ("value", self.kv.values)) for i, one in enumerate(all_)}
        return {"session.ids": self.ids, "session.position": self.position, "session.history": self.history, **self._kept, **cached}

    def bound(self, name: str) -> BoundProgram:
        """The bound program of the graph called ``name``; bound on first use, and ``decode`` before any other: it arranges the weights."""
        if name != "decode" and "decode" in self._programs:
            self.bound("decode")
        if name not in self._bound:
            self._trailing.allocated()
            graph = self._programs[name].graph
            self._bound[name] = bind(self._programs[name], self._weights, self.states, self._inputs(graph), self._executables, self._live)
        return self._bound[name]

    @property
    def backend(self) -> "Backend | None":
        """What launches the kernels of its programs; None: they hold none."""
        return self._executables.backend

    def variant(self, program: Program, kernels: Mapping[str, Kernel]) -> BoundProgram:
        """Another version of one of its programs, over the same weights and states; ``kernels`` by digest: what it has beside theirs."""
        both = evolve(self._executables, kernels={**self._executables.kernels, **kernels})
        return bind(program, self._weights, self.states, self._inputs(program.graph), both, self._live)

    def _inputs(self, graph: Graph) -> "dict[str, torch.Tensor]":
        if graph.kind is not GraphKind.PREFILL:
            return {name: zeros(graph.spec(name), self.device) for name in graph.inputs}
        if graph.tokens not in self._prefill_inputs:
            self._prefill_inputs[graph.tokens] = ChunkInputs(graph.tokens, self.device)
        return self._prefill_inputs[graph.tokens].named(graph.inputs)

    def step(self, name: str) -> Callable[[], None]:
        """What makes one run of the program called ``name``; captured on first use."""
        if name not in self._steps:
            graph = self._programs[name].graph
            # Warm-ups write where the position stands, those of chunks from 0 on.
            self.rows.hold(graph.tokens if graph.kind is GraphKind.PREFILL else int(self.position) + 1)
            if self._live is not None:  # warm-ups attend as far as any request will
                self._live.start, self._live.last_row = max(0, self.kv.capacity - graph.tokens), graph.tokens - 1
            self._steps[name] = self._decode.prepare(self.bound(name), self)
        return self._steps[name]

    def steps_at_once(self, name: str, steps: int) -> Callable[[], None] | None:
        """What makes ``steps`` steps of a decode program together; None: nothing does, and they are made one by one."""
        return self._several.of(self.bound(name), self.step(name), steps, self)

    def capture(self, run: Callable[[], None], *, warm_ups: int = 0, runs: int = 1) -> Callable[[], None] | Reject:
        """Record ``run`` with the backend that owns the device; all recordings of a session share one stream and its memory."""
        if self.backend is None:
            return Reject(f"no installed backend captures on the device {self.device}")
        return self.backend.capture(run, warm_ups=warm_ups, runs=runs, owner=self)

    def prepare(self, observer: Observer = silent) -> tuple[int, ...]:
        """Bind and capture every program now, so that no request pays for it; sizes of chunks that find no memory, see ``preparing``."""
        def capture(name: str) -> None:
            observer(Preparing(graph=name))
            self.step(name)
            start = self._programs[name].start
            if name in self._decoding.names and 1 < self.steps_per_graph <= self._decoding.end(start) - start:
                self.steps_at_once(name, self.steps_per_graph)

        with self._lock, self._trailing.behind(), as_captured():
            left_out = capture_each(capture, self._programs, self._bound, self._steps)
            release_cache()  # what warm-ups used and no request needs
            self._weights.settle(forward=partial(read_token, device=self.device, backend=self.backend))
        return left_out

    @property
    def weights(self) -> "WeightStore":
        """What the programs are bound to."""
        return self._weights

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Of the chunks that prompts are read in, in tokens, smallest first."""
        return chunk_sizes(self._programs)

    def generate(self, input_ids: "torch.Tensor", max_new_tokens: int, *, eos_token_id: int | Sequence[int] | None = None,
                 streamer: Any = None) -> "torch.Tensor":
        """Generate greedily after a prompt.

        Args:
            input_ids: int64 [1, n] on any device.
            max_new_tokens: at most this many; n + max_new_tokens must fit the context.
            eos_token_id: generation stops after one of these; None or nothing: never.
            streamer: object with ``put(int64 tensor [1])`` and ``end()``, as transformers' streamers; it sees the prompt first.

        Returns:
            int64 [1, n + m] on the CPU, m <= max_new_tokens.

        Raises:
            UsageError: shape, emptiness or length is wrong, or another request is running.
        """
        import torch

        prompt = self.checked(input_ids, max_new_tokens)
        eos = frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or ())
        with self.exclusive():
            if streamer is not None:
                self.ready(prompt.shape[1], max_new_tokens)  # a request that is refused shows nothing
                streamer.put(prompt)
            new = collected(self.greedy(prompt, max_new_tokens, eos, streamer is not None or bool(eos)), streamer)
            return torch.cat([prompt, torch.tensor([new], dtype=torch.int64)], dim=1)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """The right to run a request, whatever settings of torch the caller has.

        Raises:
            UsageError: another request is running, or the model is not the one whose programs these are any more.
        """
        with self._alone():
            self._weights.check_unchanged(self.graphs.model.name)
            with self._trailing.behind(), as_captured():
                yield

    @contextmanager
    def module_runs(self) -> Iterator[None]:
        """A block of a request in which the model itself runs: what its own forward exchanges there is no change to it."""
        try:
            yield
        finally:
            self._weights.adopt()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise UsageError("this session is busy with another request; one request at a time per session, make another session for more")
        try:
            yield
        finally:
            self._lock.release()

    def give_back(self) -> None:
        """Give back the memory of K and V, for other sessions and processes on the device, where the cache can (docs/decisions/0032).

        The next request takes what it needs again, as the first one did, or is refused if it is gone; nothing is captured again.

        Raises:
            UsageError: a request is running.
        """
        import torch

        with self._alone(), torch.inference_mode():  # as everything that writes to its caches
            self.rows.give_back()
            give_back(self.kv, 0)

    def checked(self, input_ids: "torch.Tensor", max_new_tokens: int) -> "torch.Tensor":
        """The prompt as int64 [1, n] on the CPU.

        Raises:
            UsageError: it is none, or does not fit the context with ``max_new_tokens`` behind it.
        """
        prompt = prompt_of(input_ids, self.graphs.model.vocab_size)
        check_length(prompt.shape[1], max_new_tokens, self.max_context)
        return prompt

    def ready(self, length: int, new: int) -> tuple[Chunk, ...]:
        """The chunks of a prompt of ``length`` tokens; the cache has memory for all that they and ``new`` tokens behind them write.

        Every request passes here before anything of it runs. Raises UsageError: there is not enough; nothing has changed then.
        """
        chunks = self.chunks(length, self.chunk_sizes)
        self.rows.hold(max(length + new, *(chunk.start + chunk.tokens for chunk in chunks)))
        return chunks

    def chunks(self, length: int, sizes: Sequence[int]) -> tuple[Chunk, ...]:
        """Those that a prompt of ``length`` tokens would be read in, if there were chunks of these sizes."""
        whole, again = self.graphs.whole_chunks, not self.graphs.states
        return plan_chunks(length, sizes, self.kv.capacity, padded=not whole, again=again, each=self._each)

    def prefill(self, prompt: "torch.Tensor", new: int = 0) -> BoundProgram:
        """Run a prompt [1, n] through the prefill programs; then ids, position and history stand at the first of ``new`` tokens."""
        chunks = self.ready(prompt.shape[1], new)
        self.forget(prompt)
        # All of it goes to the device at once: a copy from the host between two chunks would wait for the first of them.
        for chunk, rows in zip(chunks, rows_of(chunks, prompt, self.device), strict=True):
            name = self._run_chunk(chunk, rows, more=chunk is not chunks[-1])
        return self.bound(name)

    def forget(self, prompt: "torch.Tensor | None" = None) -> None:
        """Stand before position 0, where ``prompt`` will be read: nothing of earlier tokens is read."""
        self.kv.reset()
        self._turning.begin(prompt)
        for state in self._kept.values():
            state.zero_()

    def _run_chunk(self, chunk: Chunk, rows: "torch.Tensor", more: bool) -> str:
        """Run a chunk, see ``place``, behind which there are ``more``; its program's name."""
        if chunk.tokens == 1:
            self.ids.copy_(rows[:1].view(1, 1))
            self.position.fill_(chunk.start)
            return self.run_step(chunk.start)
        name = f"prefill_{chunk.tokens}"
        return self._run_prefill(f"{name}_fresh" if chunk.fresh and f"{name}_fresh" in self._programs else name, chunk, rows, more)

    def decode_program(self, position: int) -> str:
        """Name of the program whose step reads the token at ``position``."""
        return self._decoding.at(position)

    def run_step(self, position: int, program: str = "") -> str:
        """Run the step that reads the token at ``position``, of its own program or the one called so; the program's name."""
        name = program or self.decode_program(position)
        self.step(name)()
        return name

    def _run_prefill(self, name: str, chunk: Chunk, rows: "torch.Tensor", more: bool = False) -> str:
        step = self.step(name)
        self.place(chunk, rows)
        (getattr(step, "opening", step) if more else step)()
        return name

    def place(self, chunk: Chunk, rows: "torch.Tensor") -> None:
        """Say which chunk the prefill programs of its size read: ``rows`` say everything of it, see ``rows_of``."""
        self._prefill_inputs[chunk.tokens].flat.copy_(rows)
        if self._live is not None:
            self._live.start, self._live.last_row = chunk.start, chunk.length - 1

    def teacher_forced(self, tokens: "torch.Tensor") -> "torch.Tensor":
        """Logits [n, vocabulary] after each of the given tokens (int64 [1, n]), one decode step each; the first one is the prompt."""
        import torch

        tokens = self.checked(tokens, 1)
        with self._lock, self._trailing.behind(), as_captured(), torch.inference_mode():
            first = self.read(tokens[:, :1], tokens.shape[1])
            self._turning.begin(tokens)  # at position 0 nothing is turned
            return torch.stack([first, *(self.read_next(token, 1 + i) for i, token in enumerate(tokens[0, 1:].tolist()))])

    def read(self, prompt: "torch.Tensor", new: int = 0) -> "torch.Tensor":
        """Read a prompt [1, n] from position 0, with ``new`` tokens to come; logits [vocabulary] behind its last token."""
        return self.prefill(prompt, new).output(0)[0, -1].clone()

    def read_chunk(self, name: str, prompt: "torch.Tensor", start: int) -> "torch.Tensor":
        """Logits [vocabulary] behind what ``prompt`` [1, n] holds from ``start`` on, read by a program of as many tokens."""
        self.rows.hold(prompt.shape[1])
        whole = Chunk(tokens=prompt.shape[1] - start, start=start, length=prompt.shape[1] - start)
        return self.bound(self._run_prefill(name, whole, rows_of((whole,), prompt, self.device)[0])).output(0)[0, -1].clone()

    def read_next(self, token: int, position: int, program: str = "") -> "torch.Tensor":
        """Logits [vocabulary] behind one token at ``position``, below which the cache is filled; ``program``: by which, "": its own."""
        self.rows.hold(position + 1)
        self.ids.fill_(token)
        self.position.fill_(position)
        return self.bound(self.run_step(position, program)).output(0)[0, -1].clone()

    def greedy(self, prompt: "torch.Tensor", count: int, eos: frozenset[int], watched: bool, read: "Read | None" = None) -> "Tokens":
        """The most likely tokens behind a prompt, which ``read`` reads, else ``prefill``, for whoever has the right to run.

        ``watched``: somebody waits for each one. However it ends, the session stands at the last token that was taken; what runs beyond it
        is overwritten before it is read.
        """
        yield from self._tokens.greedy(prompt, count, eos, watched, read)

    def picking(self, prompt: "torch.Tensor", count: int, pick: Pick, watched: bool = True, read: "Read | None" = None) -> "Tokens":
        """As ``greedy``, with each token chosen by ``pick`` from the logits, until ``pick`` stops; by the device where ``pick`` lets it."""
        yield from self._tokens.picking(prompt, count, pick, watched, read)
