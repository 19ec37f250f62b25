"""Kernels of this package's own, which no search chooses: one source for each element type, built and loaded on first use."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from agentcompile_core.plugin_api import Backend, BuildError, DType, Launch, StepSource, Target

if TYPE_CHECKING:
    import torch


class OwnKernels:
    """``source(dtype)`` for the target that is live, as ``backend`` builds and launches it."""

    def __init__(self, backend: Backend, target: Callable[[], Target | None], source: Callable[[DType], StepSource]) -> None:
        self.backend, self._target, self._source = backend, target, source
        self._handles: dict[tuple[torch.device, torch.dtype], tuple[StepSource, Any]] = {}

    def launches(self, like: "torch.Tensor") -> tuple[Launch, ...]:
        """Those of the source for the element type of ``like``, on its device.

        Raises:
            BuildError: the device has no preset, or nothing builds it.
        """
        return self._built(like)[0].launches

    def run(self, like: "torch.Tensor", launch: Launch, blocks: int, tensors: "Sequence[torch.Tensor | None]",
            scalars: tuple[Any, ...]) -> None:
        """Enqueue one launch with so many blocks; ``tensors`` in the kernel's order, outputs last, None for a null pointer."""
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        handle = self._built(like)[1]
        self.backend.prepare_launch(handle, evolve(launch, grid=(blocks, 1, 1)), (*addresses, *scalars), False)(self.backend.stream())

    def _built(self, like: "torch.Tensor") -> tuple[StepSource, Any]:
        key = (like.device, like.dtype)
        if key not in self._handles:
            made, target = self._source(DType(str(like.dtype).removeprefix("torch."))), self._target()
            if target is None:
                raise BuildError("this GPU has no preset")
            self._handles[key] = made, self.backend.load(self.backend.build(made, target))
        return self._handles[key]
