"""The worker's work in this process: quick, without children, for candidates that neither crash nor hang."""

from typing import Any

from agentcompile_core.worker.evaluate import WorkerState
from agentcompile_core.worker.protocol import Evaluation


class Here:
    """Stands in for Worker where only ``evaluate`` is used."""

    def __init__(self, catalog: Any) -> None:
        self._state = WorkerState(catalog)

    def evaluate(self, jobs: Any, **_: Any) -> Any:
        """(index, evaluation) of each job, in order."""
        for index, job in enumerate(jobs):
            kernel = self._state.build(job)
            done = kernel if isinstance(kernel, Evaluation) else self._state.evaluate(job, kernel, lambda phase: None)
            yield index, done
