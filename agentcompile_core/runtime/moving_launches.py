"""Launches of bound steps whose operands lie elsewhere at every call."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ..ir.candidate import Launch
from ..ir.source_check import argument_values

if TYPE_CHECKING:
    import torch

    from ..plugin.interfaces import Backend

KEPT = 8  # sets of addresses whose launches are kept ready: allocators give the same blocks again
Prepare = Callable[[Sequence[int | float]], Callable[[int], None]]  # argument values -> ``run(stream)``


@frozen
class MovingLaunch:
    """One launch: ``run(stream, *addresses)`` enqueues it, with the addresses of the graph values ``values`` in this call."""

    run: Callable[..., None]
    values: tuple[str, ...]


def moving_launch(backend: "Backend", handle: Any, launch: Launch, addresses: Mapping[str, int], moved: Mapping[str, str],
                  pdl: bool) -> MovingLaunch:
    """``launch`` of a loaded kernel, resolved but for the addresses of a call.

    Args:
        addresses: of all operands and workspaces; those of ``moved`` operands are replaced at every run.
        moved: operand names with the graph values whose memory they are.
        pdl: as for ``Backend.prepare_launch``.
    """
    places = tuple(index for index, one in enumerate(launch.arguments) if one.addressed and one.operand in moved)
    arguments = argument_values(launch, addresses)
    if not places:
        return MovingLaunch(backend.prepare_launch(handle, launch, arguments, pdl), ())
    run = backend.prepare_moving(handle, launch, arguments, pdl, places)
    if run is None:
        run = _Prepared(lambda values: backend.prepare_launch(handle, launch, values, pdl), arguments, places)
    return MovingLaunch(run, tuple(moved[launch.arguments[index].operand] for index in places))


def enqueue(launches: Sequence[MovingLaunch], tensors: "Mapping[str, torch.Tensor]", stream: Callable[[], int]) -> None:
    """Enqueue launches on the current stream, over ``tensors`` by graph value."""
    current = stream()
    for launch in launches:
        launch.run(current, *[tensors[value].data_ptr() for value in launch.values])


class _Prepared:
    """A launch of a backend that offers no moving ones: prepared for the addresses of a call, and kept for the next like it."""

    def __init__(self, prepare: Prepare, arguments: Sequence[int | float], places: Sequence[int]) -> None:
        self._prepare, self._arguments, self._places = prepare, tuple(arguments), tuple(places)
        self._known: dict[tuple[int, ...], Callable[[int], None]] = {}

    def __call__(self, stream: int, *addresses: int) -> None:
        found = self._known.pop(addresses, None)
        if found is None:
            arguments = list(self._arguments)
            for place, address in zip(self._places, addresses, strict=True):
                arguments[place] = address
            found = self._prepare(arguments)
            while len(self._known) >= KEPT:
                del self._known[next(iter(self._known))]
        self._known[addresses] = found
        found(stream)
