"""One variant of a whole step, as it will run: timed again and again, and then asked whether it still does its work."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from ..errors import AgentCompileError, Reject
from ..ops.agreement import disagreement
from ..ops.states_in_place import copied_over
from ..plugin.interfaces import Backend
from ..runtime.bound_program import BoundProgram
from ..runtime.graph_capture import record_program

SAMPLE_US = 3000.0  # about how long a sample lasts
FEWEST_REPLAYS, MOST_REPLAYS = 3, 12  # per sample
WARM_UPS = 3
POSITION = "session.position"


def replays_of(floor_us: float) -> int:
    """How often a step is replayed for one sample, by the microseconds that its bytes need."""
    return max(FEWEST_REPLAYS, min(MOST_REPLAYS, math.ceil(SAMPLE_US / max(floor_us, 1.0))))


class States:
    """The states that every variant of one step shares, by source; how they were made, and how often a sample replays the step."""

    def __init__(self, tensors: Mapping[str, Tensor], position: int, replays: int = MOST_REPLAYS) -> None:
        self.tensors, self._position, self.replays = tensors, position, replays
        self._made = {name: tensor.clone() for name, tensor in tensors.items()}

    def reset(self) -> None:
        """Back to the position at which variants are timed."""
        if POSITION in self.tensors:
            self.tensors[POSITION].fill_(self._position)

    def stand_at(self, position: int) -> None:
        """Another position at which variants are timed from now on, not behind the one that rows were made for."""
        self._position = position

    def as_made(self) -> None:
        """Everything as it was made, at that position."""
        for name, tensor in self.tensors.items():
            tensor.copy_(self._made[name])
        self.reset()

    @property
    def integers(self) -> list[Tensor]:
        """Tokens, positions and histories: what a step leaves behind that none of its outputs shows, beside states of fixed size."""
        return [tensor for tensor in self.tensors.values() if not tensor.is_floating_point()]


class Variant:
    """A bound program over ``states``. Its first run, launch by launch from the states as they were made, says what it computes."""

    def __init__(self, bound: BoundProgram, states: States) -> None:
        self._bound, self._states = bound, states
        self._first: list[Tensor] = []

    def run_first(self) -> None:
        """Run it once and keep what it gives."""
        self._states.as_made()
        self._bound.run()
        self._first = [tensor.clone() for tensor in self._results()]

    def wrong(self) -> str:
        """One clause on how one more run, on poisoned buffers, differs from the first one; empty where it does not."""
        self._states.as_made()
        self._bound.poison()
        self.replay()
        self.settle()
        why = disagreement(self._results(), self._first)
        self._states.as_made()
        return why

    def _results(self) -> list[Tensor]:
        graph = self._bound.graph
        outputs = [self._bound.output(i) for i in range(len(graph.outputs))]
        moved = {graph.by_name[name].source for name in copied_over(graph)} & self._states.tensors.keys()
        return [*outputs, *self._states.integers, *(self._states.tensors[source] for source in sorted(moved))]

    @abstractmethod
    def replay(self) -> None:
        """Enqueue one run as it will run."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for everything that was enqueued."""

    @abstractmethod
    def sample_us(self) -> float:
        """Microseconds per replay, over some replays from the same position."""


class NotCapturable(AgentCompileError):
    """A variant of the step that the backend cannot record; the device is usable."""


class CapturedVariant(Variant):
    """Captured graphs, and from Python what no graph may hold. Keeps what they need alive."""

    def __init__(self, bound: BoundProgram, states: States, backend: Backend) -> None:
        super().__init__(bound, states)
        self._backend = backend
        self.run_first()
        replay = record_program(bound, partial(backend.capture, owner=self), warm_ups=WARM_UPS)
        if isinstance(replay, Reject):
            raise NotCapturable(replay.reason)
        self._replay = replay
        backend.synchronize()

    def replay(self) -> None:
        """Replay its graphs on the current stream."""
        self._replay()

    def settle(self) -> None:
        """Wait for the device."""
        self._backend.synchronize()

    def sample_us(self) -> float:
        """By the backend's clock."""
        self._states.reset()
        self._replay()
        return self._backend.time_from_host(lambda stream: self._replay(), repetitions=1, runs_per_repetition=self._states.replays)[0]
