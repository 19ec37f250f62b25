"""Capturing a callable into a CUDA graph."""

from collections.abc import Callable
from typing import Any, Protocol

from agentcompile_core.plugin_api import settle_generator


class NotCapturable(Exception):
    """A program did something that a CUDA graph cannot hold; the device is still usable. The text is one line."""


class Capture(Protocol):
    """Warm ``run`` up, capture ``runs`` runs of it, and return what replays them."""

    def __call__(self, run: Callable[[], None], *, warm_ups: int, runs: int, owner: object) -> Callable[[], None]:
        """Raises NotCapturable, and whatever ``run`` itself raises while it warms up."""


class CudaCapture:
    """Capture with torch. Graphs of one owner share a memory pool: they are replayed on one stream, one after another,
    and what one leaves in its outputs is valid until another one runs."""

    def __init__(self) -> None:
        from weakref import WeakKeyDictionary

        self._pools: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def __call__(self, run: Callable[[], None], *, warm_ups: int, runs: int, owner: object) -> Callable[[], None]:
        """See Capture. Warm-ups run on a side stream, so that lazy set-up (cuBLAS workspaces) precedes the capture."""
        import torch

        if owner not in self._pools:
            self._pools[owner] = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        pool, side = self._pools[owner]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm_ups):
                run()
        side.synchronize()
        _forget_workspaces()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: another thread (a tokenizer's, a server's) may use CUDA while this one captures. The outer
            # context restores the current stream, which torch leaves switched where a capture fails.
            with torch.cuda.stream(side), torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                for _ in range(runs):
                    run()
        except RuntimeError as exc:
            settle_generator()  # raises where the device itself is broken: that is no matter of capturing
            raise NotCapturable(f"{type(exc).__name__}: {str(exc).splitlines()[0]}") from exc
        torch.cuda.current_stream().wait_stream(side)
        return graph.replay


def _forget_workspaces() -> None:
    """Drop torch's cuBLAS workspaces, so that the capture allocates its own inside the graph's pool.

    A workspace from outside would be freed by whoever clears them later (torch.compile's CUDA graphs do), and replays
    would write to memory that is no longer theirs.
    """
    import torch

    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
