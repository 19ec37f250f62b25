"""A module's program recorded once over memory of its own: a call copies its inputs there, replays it, and copies the results out."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import Reject
from ..ir.graph import Graph
from ..ops.dtypes import zeros
from .bound_program import BoundProgram
from .graph_capture import Capture, record_program

if TYPE_CHECKING:
    import torch

WARM_UPS = 2
MOST_BYTES = 64 << 20  # of inputs and results: copying more takes longer than the launches of a program that moves it


class CapturedCalls:
    """What ``capture_calls`` made. Not for two threads at once, and not while anybody records another graph."""

    def __init__(self, inputs: "Sequence[torch.Tensor]", replay: Callable[[], None], results: "Sequence[torch.Tensor]",
                 written: "Sequence[torch.Tensor]") -> None:
        self._inputs, self._replay, self._results, self._written = tuple(inputs), replay, tuple(results), tuple(written)

    def __call__(self, inputs: "Sequence[torch.Tensor]") -> "tuple[torch.Tensor, ...]":
        """The program's results for inputs of its shapes and types, wherever they lie, in memory that is nobody else's."""
        for place, tensor in zip(self._inputs, inputs, strict=True):
            place.copy_(tensor)
        self._replay()
        return tuple(result.clone() for result in self._results)

    def poison(self, byte: int) -> None:
        """Fill the results that steps write with a byte, so that what a replay leaves out is seen."""
        import torch

        for result in self._written:
            result.flatten().view(torch.uint8).fill_(byte)


def capture_calls(bound: BoundProgram, graph: Graph, device: str, capture: Capture) -> CapturedCalls | Reject:
    """Record a program whose inputs and results move (BoundProgram.moving) over memory that is made here; nothing else may run it now.

    A Reject where no graph can hold all of it, where its inputs and results are more than 64 MiB, or where recording fails.
    """
    assert bound.moving is not None
    if bound.uncapturable:
        return Reject(f"{bound.uncapturable[0]} cannot be captured")
    nbytes = sum(graph.spec(name).nbytes for name in dict.fromkeys((*graph.inputs, *graph.outputs)))
    if nbytes > MOST_BYTES:
        return Reject(f"its inputs and results are {nbytes >> 20} MiB, and calls copy at most {MOST_BYTES >> 20} MiB")
    places = {name: zeros(graph.spec(name), device) for name in (*graph.inputs, *bound.moving.results)}
    bound.moving.to(places)
    try:
        replay = record_program(bound, capture, warm_ups=WARM_UPS)
        if isinstance(replay, Reject):
            return replay
        results = [bound.environment[name] for name in graph.outputs]
        written = [places[name] for name in bound.moving.results]
        return CapturedCalls([places[name] for name in graph.inputs], replay, results, written)
    finally:
        bound.moving.forget()
