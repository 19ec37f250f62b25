"""The decode runtime."""

import logging
import weakref
from collections.abc import Callable
from typing import Literal

from agentcompile_core.plugin_api import DecodeRuntime, Reject, RunnableProgram, SessionState, UsageError, VerificationError, record_program

log = logging.getLogger("agentcompile.runtime.cudagraph")
WARM_UPS = 1  # what is built, loaded and compared late is so at the first call; a second one of 13 programs takes a deep model a second


class GraphStep:
    """One call replays the captured runs, or makes them from Python where ``reason`` says why they were not captured.

    ``outside`` names the segments that run from Python between captured ones.
    """

    def __init__(self, name: str, session: SessionState, replay: Callable[[], None], reason: str = "",
                 outside: tuple[str, ...] = ()) -> None:
        self.name = name
        self.reason = reason
        self.outside = outside
        self._session = weakref.ref(session)  # which owns this step: in a circle both would stay until somebody collects garbage
        self._generation = session.generation
        self._replay = replay

    @property
    def captured(self) -> bool:
        """Whether a graph is replayed."""
        return not self.reason

    def __call__(self) -> None:
        """Enqueue on the current stream.

        Raises:
            VerificationError: the session is gone, or its buffers have moved since the capture.
        """
        self._check()
        self._replay()

    def opening(self) -> None:
        """Enqueue one run without the closing pieces of the program.

        Raises:
            VerificationError: the session is gone, or its buffers have moved since the capture.
        """
        self._check()
        getattr(self._replay, "opening", self._replay)()

    def _check(self) -> None:
        session = self._session()
        if session is None:
            raise VerificationError(f"graph {self.name} was captured for a session that is gone; prepare the program again")
        if session.generation != self._generation:
            raise VerificationError(f"graph {self.name} was captured for generation {self._generation} of the session's "
                                    f"buffers, which are at {session.generation} now; prepare the program again")


class CudaGraphRuntime(DecodeRuntime):
    """Captures each program once, as the backend of the device captures. Keeps nothing itself; graphs belong to the steps it returns."""

    name = "cudagraph"
    version = 1
    preference = 10
    needs_capture = True
    several_steps = True

    def available(self, device: str) -> Literal[True] | Reject:
        """True: it is asked where a backend captures on the device."""
        return True

    def prepare(self, bound: RunnableProgram, session: SessionState, steps: int = 1) -> GraphStep:
        """Capture ``steps`` runs of ``bound`` and return what replays them; the session's state stays as it was.

        A segment that no graph may hold (``RunnableProgram.pieces``) splits it: what lies before and behind is captured,
        the segment itself runs from Python. Where the rest cannot be captured either, the step runs all of it from Python
        and says why.

        Raises:
            UsageError: ``steps`` is less than 1.
        """
        from .preserve import preserved

        if steps < 1:
            raise UsageError(f"{steps} steps in one graph; at least 1")
        if not any(piece.capturable for piece in bound.pieces()):
            return self._from_python(bound, session, steps, f"{', '.join(dict.fromkeys(bound.uncapturable))} cannot be captured")
        if bound.uncapturable:
            log.info("graph %s is cut at %s", bound.graph.name, ", ".join(dict.fromkeys(bound.uncapturable)))
        with preserved(bound, session, WARM_UPS):
            replay = record_program(bound, session.capture, warm_ups=WARM_UPS, runs=steps)
        if isinstance(replay, Reject):
            return self._from_python(bound, session, steps, replay.reason)
        return GraphStep(bound.graph.name, session, replay, outside=bound.uncapturable)

    @staticmethod
    def _from_python(bound: RunnableProgram, session: SessionState, steps: int, reason: str) -> GraphStep:
        name = bound.graph.name
        log.warning("graph %s runs from Python, launch by launch: %s", name, reason)
        return GraphStep(name, session, _repeated(bound.run, steps), reason)


def _repeated(once: Callable[[], None], steps: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(steps):
            once()

    return once if steps == 1 else run
