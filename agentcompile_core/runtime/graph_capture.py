"""What every user of CUDA graph capture needs: programs in pieces, and torch's state after a capture that failed."""

from collections.abc import Callable, Iterable

from ..plugin.running import RunnablePiece


def composed(pieces: Iterable[RunnablePiece], capture: Callable[[Callable[[], None]], Callable[[], None]]) -> Callable[[], None]:
    """Capture what can be captured, leave the rest as it is; the result runs all of it in order.

    ``capture`` gets the ``run`` of a piece that has been warmed up and returns what replays it. The pieces that are not
    captured run from Python at every call, between the graphs on their two sides, and not while those are captured.
    """
    parts = tuple(capture(piece.run) if piece.capturable else piece.run for piece in pieces)
    if len(parts) == 1:
        return parts[0]

    def run() -> None:
        for part in parts:
            part()

    return run


def settle_generator() -> None:
    """End the state of "being captured" in which a failed capture leaves torch's default generator.

    torch ends it only when a capture succeeds; until then every random number on the device raises "Offset increment
    outside graph capture". So an empty graph is captured.
    """
    import warnings

    import torch

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(), torch.cuda.stream(stream):
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_begin(capture_error_mode="thread_local")
        graph.capture_end()
