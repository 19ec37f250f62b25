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
        self._handles: dict[torch.dtype, tuple[StepSource, Any]] = {}

    def launches(self, dtype: "torch.dtype") -> tuple[Launch, ...]:
        """Those of the source for one element type.

        Raises:
            BuildError: the device has no preset, or nothing builds it.
        """
        return self._built(dtype)[0].launches

    def run(self, dtype: "torch.dtype", launch: Launch, blocks: int, tensors: "Sequence[torch.Tensor | None]",
            scalars: tuple[Any, ...]) -> None:
        """Enqueue one launch with so many blocks; ``tensors`` in the kernel's order, outputs last, None for a null pointer."""
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        handle = self._built(dtype)[1]
        self.backend.prepare_launch(handle, evolve(launch, grid=(blocks, 1, 1)), (*addresses, *scalars), False)(self.backend.stream())

    def _built(self, dtype: "torch.dtype") -> tuple[StepSource, Any]:
        if dtype not in self._handles:
            made, target = self._source(DType(str(dtype).removeprefix("torch."))), self._target()
            if target is None:
                raise BuildError("this GPU has no preset")
            self._handles[dtype] = made, self.backend.load(self.backend.build(made, target))
        return self._handles[dtype]
