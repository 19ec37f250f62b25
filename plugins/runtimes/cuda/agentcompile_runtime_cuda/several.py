"""Several runs of one step in one launch, such as attention of the rows of a batch, by kernels that are built when they are asked for."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from agentcompile_cuda_kit.runs import several_runs
from attrs import evolve

from agentcompile_core.plugin_api import Backend, BuildError, ContractError, Launch, StepSource, Target

from .own_kernels import build_once

if TYPE_CHECKING:
    import torch

    Enqueue = Callable[[int], None]

log = logging.getLogger("agentcompile.runtime.cuda")
MOST_DEPTH = 65535  # of a grid


class SeveralRuns:
    """See ``Backend.prepare_runs``; ``backend`` builds for the target that is live."""

    def __init__(self, backend: Backend, target: Callable[[], Target | None]) -> None:
        self._backend, self._target = backend, target

    def __call__(self, source: StepSource, arguments: "Sequence[Sequence[Sequence[int | float]]]",
                 device: "torch.device | str") -> "tuple[Enqueue, ...] | None":
        """One launch each; None where the text has no such kernel, or it cannot be built."""
        target = self._target()
        try:
            several = several_runs(source)
            if target is None or several is None or max(launch.grid[2] for launch in source.launches) * len(arguments[0]) > MOST_DEPTH:
                return None
            handle = self._backend.load(build_once(self._backend, several, target).result())
        except (BuildError, ContractError) as exc:
            log.info("runs of %s are launches of their own: %s", source.launches[0].entry, exc)
            return None
        return tuple(self._prepared(handle, launch, one, runs, device)
                     for launch, one, runs in zip(several.launches, source.launches, arguments, strict=True))

    def _prepared(self, handle: object, launch: Launch, one: Launch, runs: "Sequence[Sequence[int | float]]",
                  device: "torch.device | str") -> "Enqueue":
        import torch

        addresses = torch.tensor([[int(value) for value, argument in zip(values, one.arguments, strict=True) if argument.addressed]
                                  for values in runs], device=device)
        scalars = (value for value, argument in zip(runs[0], one.arguments, strict=True) if not argument.addressed)
        width, height, depth = launch.grid
        enqueue = self._backend.prepare_launch(handle, evolve(launch, grid=(width, height, depth * len(runs))),
                                               (addresses.data_ptr(), *scalars), launch.pdl)

        def run(stream: int, kept: torch.Tensor = addresses) -> None:
            enqueue(stream)

        return run
