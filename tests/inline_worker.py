"""The worker's work in this process: quick, without children, for candidates that neither crash nor hang."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from attrs import evolve

from agentcompile_core.plugin.catalog import Catalog
from agentcompile_core.worker.evaluate import WorkerState
from agentcompile_core.worker.protocol import Evaluation


class Here:
    """Stands in for Worker where only ``start``, ``evaluate`` and ``close`` are used."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._state: WorkerState | None = None

    @property
    def runs(self) -> bool:
        """Whether there is a state."""
        return self._state is not None

    def start(self, backend: str = "") -> None:
        """Make the state."""
        self._state = self._state or WorkerState(self._catalog)

    def prepare(self, *_: Any) -> None:
        """There is nobody to wait for."""

    def close(self) -> None:
        """Forget it."""
        self._state = None

    def evaluate(self, jobs: Iterable[Any], stop_at: float | None = None, **_: Any) -> Iterator[tuple[int, Evaluation]]:
        """(index, evaluation) of each job in order, until ``stop_at``."""
        self.start()
        assert self._state is not None
        for index, job in enumerate(jobs):
            if stop_at is not None and time.monotonic() >= stop_at:
                return
            built = self._state.build(job)  # None: an implementation, which is bound
            yield index, built if isinstance(built, Evaluation) else evolve(
                self._state.evaluate(job, built, lambda phase: None), kernel=built)
