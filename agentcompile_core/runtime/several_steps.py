"""Several decode steps in one captured graph, beside the graph of one step (docs/decisions/0028)."""

from collections.abc import Callable

from ..plugin.interfaces import DecodeRuntime
from ..plugin.running import SessionState
from .bound_program import BoundProgram


class SeveralSteps:
    """Of one session: what makes several steps of a decode program at once, by program and number of steps."""

    def __init__(self, runtime: DecodeRuntime) -> None:
        self._runtime = runtime
        self._known: dict[tuple[str, int], Callable[[], None] | None] = {}

    def of(self, bound: BoundProgram, single: Callable[[], None], steps: int, session: SessionState) -> Callable[[], None] | None:
        """What makes ``steps`` steps of ``bound``, of which ``single`` makes one; prepared for ``session`` when it is asked for first.

        None: nothing does, or it gains nothing, and steps are made one by one.
        """
        key = bound.program.name, steps
        if key not in self._known:
            self._known[key] = self._prepared(bound, single, steps, session)
        return self._known[key]

    def _prepared(self, bound: BoundProgram, single: Callable[[], None], steps: int, session: SessionState) -> Callable[[], None] | None:
        # A part that runs from Python between two graphs reads where the last capture has left the values of the part before it,
        # so a program in pieces is captured once.
        if not self._runtime.several_steps or bound.uncapturable or _reason(single):
            return None
        places = dict(bound.environment)
        try:
            found = self._runtime.prepare(bound, session, steps)
        finally:  # whoever reads the logits of a single step finds them where its own graph leaves them
            bound.environment.update(places)
        return None if _reason(found) else found


def _reason(step: Callable[[], None]) -> str:
    """Why a decode runtime did not capture what it should have; empty: it did, or needs to capture nothing."""
    return str(getattr(step, "reason", ""))
