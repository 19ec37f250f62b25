"""What backends of CUDA kernels share to enqueue several runs of one step as one launch: see ``Backend.prepare_runs``."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from agentcompile_core.plugin_api import Backend, BuildError, ContractError, Kernel, Launch, StepSource

from .runs import several_runs

if TYPE_CHECKING:
    import torch

    Enqueue = Callable[[int], None]

log = logging.getLogger("agentcompile.cuda_kit")
MOST_DEPTH = 65535  # of a grid


class SeveralRuns:
    """Kernels of several runs, which ``build`` builds and ``backend`` loads and launches; addresses lie on ``device``."""

    def __init__(self, backend: Backend, build: Callable[[StepSource], Kernel], device: str) -> None:
        self._backend, self._build, self._device = backend, build, device
        self._made: dict[str, tuple[StepSource, Kernel] | None] = {}  # by source; None: there is none

    def __call__(self, source: StepSource, arguments: "Sequence[Sequence[Sequence[int | float]]]") -> "tuple[Enqueue, ...] | None":
        """One launch each; None where the text has no such kernel, or it can be neither built nor loaded."""
        import torch

        if source.key not in self._made:
            self._made[source.key] = self._kernel(source)
        made = self._made[source.key]
        if made is None or max(launch.grid[2] for launch in source.launches) * len(arguments[0]) > MOST_DEPTH:
            return None
        several = made[0]
        try:
            handle = self._backend.load(made[1])  # into the device that is current
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as exc:
            log.info("runs of %s are launches of their own: %s", source.launches[0].entry, exc)
            return None
        return tuple(self._prepared(handle, launch, of_one, runs)
                     for launch, of_one, runs in zip(several.launches, source.launches, arguments, strict=True))

    def _kernel(self, source: StepSource) -> tuple[StepSource, Kernel] | None:
        try:
            several = several_runs(source)
            return None if several is None else (several, self._build(several))
        except (BuildError, ContractError) as exc:
            log.info("runs of %s are launches of their own: %s", source.launches[0].entry, exc)
            return None

    def _prepared(self, handle: Any, launch: Launch, of_one: Launch, runs: "Sequence[Sequence[int | float]]") -> "Enqueue":
        import torch

        is_addressed = [argument.addressed for argument in of_one.arguments]
        addresses = torch.tensor([[int(value) for value, one in zip(values, is_addressed, strict=True) if one] for values in runs],
                                 device=self._device)
        scalars = (value for value, one in zip(runs[0], is_addressed, strict=True) if not one)
        width, height, depth = launch.grid
        enqueue = self._backend.prepare_launch(handle, evolve(launch, grid=(width, height, depth * len(runs))),
                                               (addresses.data_ptr(), *scalars), launch.pdl)

        def run(stream: int, kept: "torch.Tensor" = addresses) -> None:
            enqueue(stream)

        return run
