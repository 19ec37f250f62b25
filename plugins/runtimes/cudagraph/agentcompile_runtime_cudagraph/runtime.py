"""The decode runtime."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from agentcompile_core.errors import Reject, UsageError, VerificationError
from agentcompile_core.interfaces import DecodeRuntime

from .capture import Capture, CudaCapture, NotCapturable

if TYPE_CHECKING:
    from agentcompile_core.program import BoundProgram
    from agentcompile_core.session import Session

log = logging.getLogger("agentcompile.runtime.cudagraph")
WARM_UPS = 2


class GraphStep:
    """One call replays the captured runs, or makes them from Python where ``reason`` says why they were not captured."""

    def __init__(self, name: str, session: "Session", replay: Callable[[], None], reason: str = "") -> None:
        self.name = name
        self.reason = reason
        self._session = session
        self._generation = session.generation
        self._replay = replay

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph is replayed."""
        return not self.reason

    def __call__(self) -> None:
        """Enqueue on the current stream.

        Raises:
            VerificationError: the session's buffers have moved since the capture.
        """
        if self._session.generation != self._generation:
            raise VerificationError(f"graph {self.name} was captured for generation {self._generation} of the session's "
                                    f"buffers, which are at {self._session.generation} now; prepare the program again")
        self._replay()


class CudaGraphRuntime(DecodeRuntime):
    """Captures each program once. Keeps one memory pool per session; everything else belongs to the steps it returns."""

    name = "cudagraph"
    version = 1

    def __init__(self, capture: Capture | None = None) -> None:
        self._capture = capture or CudaCapture()

    def available(self, device: str) -> Literal[True] | Reject:
        """True for programs on a CUDA device that is there."""
        import torch

        if torch.device(device).type != "cuda":
            return Reject(f"CUDA graphs need a program on a CUDA device, not on {device}")
        if not torch.cuda.is_available():
            return Reject("torch sees no CUDA device")
        return True

    def prepare(self, bound: "BoundProgram", session: "Session", steps: int = 1) -> GraphStep:
        """Capture ``steps`` runs of ``bound`` and return what replays them; the session's state stays as it was.

        Where the program cannot be captured the step runs it from Python and says why.

        Raises:
            UsageError: ``steps`` is less than 1.
        """
        from .preserve import preserved

        if steps < 1:
            raise UsageError(f"{steps} steps in one graph; at least 1")
        name = bound.program.graph.name
        if bound.uncapturable:
            return self._from_python(bound, session, steps, f"{', '.join(bound.uncapturable)} cannot be captured")
        try:
            with preserved(bound, session, WARM_UPS):
                replay = self._capture(bound.run, warm_ups=WARM_UPS, runs=steps, owner=session)
        except NotCapturable as exc:
            return self._from_python(bound, session, steps, str(exc))
        return GraphStep(name, session, replay)

    @staticmethod
    def _from_python(bound: "BoundProgram", session: "Session", steps: int, reason: str) -> GraphStep:
        name = bound.program.graph.name
        log.warning("graph %s runs from Python, launch by launch: %s", name, reason)

        def run() -> None:
            for _ in range(steps):
                bound.run()

        return GraphStep(name, session, bound.run if steps == 1 else run, reason)
