"""Kernels of this package's own, which no search chooses: one source for each element type, built and loaded on first use.

A binary is built once in a process, whichever backend object asks for it.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from attrs import evolve

from agentcompile_core.plugin_api import Backend, BuildError, DType, Feature, Kernel, Launch, StepSource, Target

if TYPE_CHECKING:
    import torch

_lock = threading.Lock()
_builds: dict[tuple[str, str, str, str], "Future[Kernel]"] = {}  # by backend, compiler, source and architecture


class OwnKernels:
    """``source(dtype)`` for the target that is live, as ``backend`` builds and launches it."""

    def __init__(self, backend: Backend, target: Callable[[], Target | None], source: Callable[[DType], StepSource]) -> None:
        self.backend, self._target, self._source = backend, target, source
        self._targets: dict[torch.device, Target | None] = {}
        self._sources: dict[torch.dtype, StepSource] = {}
        self._handles: dict[tuple[torch.device, torch.dtype], tuple[StepSource, Any]] = {}

    def target(self, like: "torch.Tensor") -> Target | None:
        """What is known of the device of ``like``; None: nothing."""
        if self._targets.get(like.device) is None:
            self._targets[like.device] = self._target()
        return self._targets[like.device]

    def may_serve(self, like: "torch.Tensor") -> bool:
        """Whether the device has what the source for the element type of ``like`` needs."""
        target = self.target(like)
        return target is not None and all(target.has(feature) for feature in self._of(like).features)

    def start(self, like: "torch.Tensor") -> None:
        """Begin to build the source for the element type of ``like``, where the device may run it, beside what the caller does.

        Failures are told to who needs it.
        """
        target = self.target(like)
        if target is not None and self.may_serve(like):
            build_once(self.backend, self._of(like), target)

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
        handle, target = self._built(like)[1], self.target(like)
        is_early = launch.pdl and target is not None and target.has(Feature.GRIDDEPCONTROL)
        self.backend.prepare_launch(handle, evolve(launch, grid=(blocks, 1, 1)), (*addresses, *scalars), is_early)(self.backend.stream())

    def _of(self, like: "torch.Tensor") -> StepSource:
        if like.dtype not in self._sources:
            self._sources[like.dtype] = self._source(DType(str(like.dtype).removeprefix("torch.")))
        return self._sources[like.dtype]

    def _built(self, like: "torch.Tensor") -> tuple[StepSource, Any]:
        key = (like.device, like.dtype)
        if key not in self._handles:
            made, target = self._of(like), self.target(like)
            if target is None:
                raise BuildError("this GPU has no preset")
            self._handles[key] = made, self.backend.load(build_once(self.backend, made, target).result())
        return self._handles[key]


def build_once(backend: Backend, source: StepSource, target: Target) -> "Future[Kernel]":
    """The kernel of a source, now or soon. What failed is tried again by the next one who asks."""
    key = (backend.name, backend.compiler(), source.digest, target.arch)
    with _lock:
        known = _builds.get(key)
        if known is None or (known.done() and known.exception() is not None):
            known = _builds[key] = Future()
            try:
                threading.Thread(target=_run, args=(known, backend, source, target), name="build of an own kernel", daemon=True).start()
            except RuntimeError as exc:  # there are as many threads as there may be
                known.set_exception(exc)
    return known


def _run(build: "Future[Kernel]", backend: Backend, source: StepSource, target: Target) -> None:
    try:
        build.set_result(backend.build_own(source, target))
    except BaseException as exc:  # whoever waits for it gets it
        build.set_exception(exc)
