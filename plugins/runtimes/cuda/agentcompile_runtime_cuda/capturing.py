"""The one way in which anything is captured into a CUDA graph: the session's programs, the chain's judge, what is timed."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from agentcompile_core.plugin_api import Reject, uncollected

if TYPE_CHECKING:
    import torch

    Place = tuple[tuple[int, int] | None, torch.cuda.Stream]  # a memory pool and the stream on which it is captured


SPARE_BYTES = 4 << 30  # of the device; less than that is shared with care


class Captures:
    """Captures with torch. Graphs of one owner share a memory pool and a capture stream: they are replayed on one stream, one
    after another, and what one leaves in its outputs is valid until another one runs."""

    def __init__(self, ready: Callable[[], None]) -> None:
        """``ready`` waits until no other thread of this package uses the device's libraries."""
        self._ready = ready
        self._places: WeakKeyDictionary[object, Place] = WeakKeyDictionary()

    def __call__(self, run: Callable[[], None], *, warm_ups: int, runs: int, owner: object) -> Callable[[], None] | Reject:
        """See ``Backend.capture``. Warm-ups run on the capture stream, so that lazy set-up (cuBLAS workspaces) precedes the capture."""
        import torch

        self._ready()
        place = self._place(owner)
        side = place[1]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm_ups):
                run()
        side.synchronize()
        graph = self._captured(run, runs, owner, place)
        if isinstance(graph, torch.OutOfMemoryError) and owner is not None:
            gc.collect()  # circles may hold memory
            torch.cuda.empty_cache()  # what warm-ups left there is no pool's, and torch gives nothing back while it captures
            place = self._place(owner)
            graph = self._captured(run, runs, owner, place)
        if isinstance(graph, RuntimeError):
            return Reject(f"cannot be captured into a CUDA graph: {first_line(graph)}")
        torch.cuda.current_stream().wait_stream(place[1])
        return _Replay(graph, run)

    def _captured(self, run: Callable[[], None], runs: int, owner: object, place: "Place") -> "torch.cuda.CUDAGraph | RuntimeError":
        """``runs`` runs as a graph, or why they cannot be captured."""
        import torch

        (pool, side), graph = place, torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(side), _recorded(graph) if pool is None else _kept(graph, pool), uncollected():
                for _ in range(runs):
                    run()
        except Exception as exc:
            if owner is not None:
                self._places.pop(owner, None)  # some torch leaves a pool "being recorded to", and refuses the next capture into it
            settle_generator()  # raises where the device itself is broken: that is no matter of capturing
            if not isinstance(exc, RuntimeError):
                raise
            return exc
        return graph

    def _place(self, owner: object) -> "Place":
        import torch

        if owner is None:
            return None, torch.cuda.Stream()
        if owner not in self._places:
            self._places[owner] = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        return self._places[owner]


class _Replay:
    """Replays a graph, and keeps what it recorded, since a graph holds addresses and not the tensors that were there."""

    def __init__(self, graph: "torch.cuda.CUDAGraph", run: Callable[[], None]) -> None:
        self._replay, self._run = graph.replay, run

    def __call__(self) -> None:
        self._replay()


@contextlib.contextmanager
def _kept(graph: "torch.cuda.CUDAGraph", pool: "tuple[int, int]") -> Iterator[None]:
    """Capture what stays: into the owner's pool, which takes new memory; cached blocks are given back where there is little of that."""
    import torch

    _forget_workspaces()
    seen = torch.cuda.memory_stats_as_nested_dict()  # a fifth of the time that memory_reserved takes
    cached_bytes = seen["reserved_bytes"]["all"]["current"] - seen["allocated_bytes"]["all"]["current"]
    if torch.cuda.mem_get_info()[0] < max(SPARE_BYTES, cached_bytes):
        torch.cuda.empty_cache()
    with _recorded(graph, pool):
        yield


@contextlib.contextmanager
def _recorded(graph: "torch.cuda.CUDAGraph", pool: "tuple[int, int] | None" = None) -> Iterator[None]:
    """Capture on the current stream. Not by ``torch.cuda.graph``: it empties the allocator's cache each time, which for the 198 pieces of a
    deep model's programs takes 0.2 s."""
    import torch

    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    try:
        # thread_local: another thread (a tokenizer's, a server's) may use CUDA while this one captures.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException as exc:
            try:
                graph.capture_end()
            except RuntimeError as end:
                if isinstance(exc, Exception) and not isinstance(exc, RuntimeError):
                    # Libraries of other languages name by classes of their own what no capture allows.
                    raise RuntimeError(f"{first_line(end)}; {first_line(exc)}") from exc
            raise
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # a caller may ask whether timing works
            graph.capture_end()
    except BaseException:
        _abandon(pool)
        raise


def _abandon(pool: "tuple[int, int]") -> None:
    """Have torch's allocator end what a failed capture began.

    torch before 2.12 leaves that undone (https://github.com/pytorch/pytorch/pull/180395): from then on no cached memory of the process
    would be given back, also where there is none left, and objects that wait for events would end it.
    """
    import torch

    end, release = (getattr(torch._C, name, None) for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"))
    if end is None or release is None:
        return
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # nothing is recorded to it: torch has ended it
        end(device, pool)
        release(device, pool)  # which the graph does where it was captured


def settle_generator() -> None:
    """End the state of "being captured" in which a failed capture leaves torch's default generator.

    torch ends it only when a capture succeeds; until then every random number on the device raises "Offset increment
    outside graph capture". So an empty graph is captured.
    """
    import torch

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), _recorded(torch.cuda.CUDAGraph()):
        pass


def first_line(exc: BaseException) -> str:
    """What was raised, in one line."""
    return f"{type(exc).__name__}: {next(iter(str(exc).splitlines()), 'no message')}"


def _forget_workspaces() -> None:
    """Drop torch's cuBLAS workspaces, so that the capture allocates its own inside the graph's pool.

    A workspace from outside would be freed by whoever clears them later (torch.compile's CUDA graphs do), and replays
    would write to memory that is no longer theirs.
    """
    import torch

    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
