"""The core's own runtime integrations: what a model runs on when no runtime plugin is installed."""

from collections.abc import Callable, Iterable
from typing import Literal

from ..errors import Reject
from ..ir.graph import KVSpec
from ..ops.dtypes import torch_dtype
from ..plugin.hookspecs import hookimpl
from ..plugin.interfaces import DecodeRuntime, KVCacheRuntime, RuntimeIntegration
from ..plugin.running import KVState, RunnableProgram, SessionState

CORES_OWN = -1  # preference: any plugin's runtime is taken before


class PlainKVState:
    """K and V of every layer in the shapes that ``kv`` says, zero at the start."""

    def __init__(self, kv: KVSpec, device: str) -> None:
        import torch

        dtype = torch_dtype(kv.dtype)
        self.keys = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in kv.key_shapes)
        self.values = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in kv.value_shapes)
        self.capacity = kv.capacity

    def reset(self) -> None:
        """Nothing to do: positions beyond the session's length are never read."""


class PlainKVCache(KVCacheRuntime):
    """Preallocated K and V without any further service."""

    name = "plain"
    preference = CORES_OWN

    def allocate(self, kv: KVSpec, device: str) -> KVState:
        """Allocate zeroed tensors."""
        return PlainKVState(kv, device)


class _FromPython:
    """Runs a program as it is at each call."""

    def __init__(self, bound: RunnableProgram, steps: int) -> None:
        self._bound, self._steps = bound, steps

    def __call__(self) -> None:
        for _ in range(self._steps):
            self._bound.run()

    def opening(self) -> None:
        """Once, without the closing pieces."""
        for piece in self._bound.pieces():
            if piece.closing:
                break
            piece.run()


class PythonLoop(DecodeRuntime):
    """Runs every step from Python: works everywhere, launch bound on a GPU."""

    name = "python_loop"
    preference = CORES_OWN

    def available(self, device: str) -> Literal[True] | Reject:
        """Always."""
        return True

    def prepare(self, bound: RunnableProgram, session: SessionState, steps: int = 1) -> Callable[[], None]:
        """Return the program's own ``run``, ``steps`` times: nobody asks for more than one, since nothing is gained."""
        return _FromPython(bound, steps)


@hookimpl
def agentcompile_runtimes() -> Iterable[RuntimeIntegration]:
    """Offer ``plain`` and ``python_loop``."""
    return (PlainKVCache(), PythonLoop())
