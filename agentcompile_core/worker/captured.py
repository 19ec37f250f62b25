"""One variant of a whole step, as it will run: timed again and again, and then asked whether it still does its work."""

from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..ops.agreement import disagreement
from ..runtime.bound_program import BoundProgram
from ..runtime.graph_capture import composed

REPLAYS = 12  # per sample
WARM_UPS = 3


class Variant:
    """A bound program over ``states``; ``reset`` puts it back to the position at which it is timed.

    Its first run, launch by launch from the states as they were made, says what it computes.
    """

    def __init__(self, bound: BoundProgram, states: Mapping[str, Tensor], reset: Callable[[], None]) -> None:
        self._bound, self._states, self.reset = bound, states, reset
        self._made = {name: tensor.clone() for name, tensor in states.items()}
        self._first: list[Tensor] = []

    def run_first(self) -> None:
        """Run it once and keep what it gives."""
        self._as_made()
        self._bound.run()
        self._first = [tensor.clone() for tensor in self._results()]

    def wrong(self) -> str:
        """One clause on how one more run, on poisoned buffers, differs from the first one; empty where it does not."""
        self._as_made()
        self._bound.poison()
        self.replay()
        self.settle()
        why = disagreement(self._results(), self._first)
        self._as_made()
        return why

    def _as_made(self) -> None:
        for name, tensor in self._states.items():
            tensor.copy_(self._made[name])
        self.reset()

    def _results(self) -> list[Tensor]:
        outputs = [self._bound.output(i) for i in range(len(self._bound.graph.outputs))]
        return [*outputs, *self._states.values()]

    @abstractmethod
    def replay(self) -> None:
        """Enqueue one run as it will run."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for everything that was enqueued."""

    @abstractmethod
    def sample_us(self) -> float:
        """Microseconds per replay, over REPLAYS replays from the same position."""


class CapturedVariant(Variant):
    """Captured CUDA graphs, and from Python what no graph may hold. Keeps what they need alive."""

    def __init__(self, bound: BoundProgram, states: Mapping[str, Tensor], reset: Callable[[], None]) -> None:
        super().__init__(bound, states, reset)
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self.run_first()
            for _ in range(WARM_UPS):
                bound.run()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._replay = composed(bound.pieces(), self._capture)
        torch.cuda.synchronize()

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # The outer context restores the current stream, which torch leaves switched where a capture fails.
        with torch.cuda.stream(self._stream), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        self._graphs.append(graph)
        return graph.replay

    def replay(self) -> None:
        """Replay its graphs on the current stream."""
        self._replay()

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def sample_us(self) -> float:
        """By CUDA events."""
        self.reset()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._replay()
        start.record()
        for _ in range(REPLAYS):
            self._replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / REPLAYS
