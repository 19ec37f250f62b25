"""What every stage may see besides its input: the catalog, the target, the configuration, the store, and where to report."""

from typing import TYPE_CHECKING

from attrs import Factory, define, evolve

from .budget import Budget
from .configuration import Config
from .errors import Failure
from .ir.target import Target
from .plugin import settings
from .plugin.events import Event, Observer
from .plugin.failures import Failures

if TYPE_CHECKING:
    from .plugin.catalog import Catalog
    from .plugin.interfaces import Backend
    from .store import Store
    from .worker import Worker


@define(kw_only=True)
class Context:
    """Handed to every stage. Stages return their results, they do not leave them here; what went wrong is in ``failures``."""

    catalog: "Catalog"
    target: Target
    config: Config
    store: "Store"
    backend: "Backend | None" = None
    worker: "Worker | None" = None  # see running_worker
    budget: Budget = Factory(lambda self: Budget(self.config.budget_s), takes_self=True)

    @property
    def failures(self) -> Failures:
        """Everything that went wrong since plugins were loaded."""
        return self.catalog.failures

    def emit(self, event: Event) -> None:
        """Tell the observer and the plugins that listen."""
        self.catalog.emit(event)

    def fail(self, failure: Failure) -> None:
        """Record what went wrong with a kernel, a compiler, a service or the worker; faults of plugins go to ``catalog.guard``."""
        self.catalog.record(failure)

    def watched(self, observer: Observer) -> "Context":
        """The same context with ``observer`` in place of the one before."""
        return evolve(self, catalog=self.catalog.for_one_run(observer))

    def running_worker(self) -> "Worker":
        """The worker of this compilation; made, not started, if there is none yet."""
        from .worker import Worker

        if self.worker is None:
            deadlines_s = dict(self.backend.deadlines_s) if self.backend is not None else {}
            named = tuple(name for backend in self.catalog.backends.values() for name in backend.environment)
            self.worker = Worker(deadlines_s=deadlines_s, settings=settings.document(self.catalog), environment=named)
        return self.worker

    def prepare_worker(self) -> None:
        """Let the worker start beside what is done now, where there is a backend for it to run kernels with."""
        if self.backend is not None:
            self.running_worker().start(self.backend.name)

    def close(self) -> None:
        """End the worker, so that the device memory it holds is free."""
        if self.worker is not None:
            self.worker.close()
