"""What every stage may see besides its input: the catalog, the target, the configuration, the store, and where to report."""

from typing import TYPE_CHECKING

from attrs import Factory, define, evolve, frozen

from .budget import Budget
from .errors import Failure
from .ir.target import Target
from .plugin.events import Event, Observer
from .plugin.failures import Failures

if TYPE_CHECKING:
    from .plugin.catalog import Catalog
    from .plugin.interfaces import Backend
    from .store import Store
    from .worker import Worker


@frozen(kw_only=True)
class Config:
    """The choices of one compilation; everything is by name. Unknown names are refused where they are resolved.

    ``budget_s`` is the whole search: advice, building, checking, timing, the validators of winners and the chain. Of it 0.3
    are kept for the chain (where a device can time one) and 0.1 for validators of winners (where some are named), so that
    150 s leave 90 s for candidates on a GPU. Capture, planning and binding are not part of it.
    """

    advisor: str = "heuristic"
    advisor_options: tuple[tuple[str, str], ...] = ()
    validators: tuple[str, ...] = ("numerics",)
    backend: str = ""  # empty: cuda where a GPU is, else emulation where it is installed
    kv_cache: str = ""  # empty: flashkv where it is installed, else the core's own
    decode: str = ""  # empty: cudagraph where it is installed and a GPU is there, else python_loop
    origins: tuple[str, ...] = ("generated", "handwritten", "third_party")
    budget_s: float = 150.0
    budget_plans: int = 400
    rounds: int = 2
    margin: float = 0.01  # a candidate must beat its baseline by this share beyond the noise
    seed: int = 0


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
            self.worker = Worker(deadlines_s=dict(self.backend.deadlines_s) if self.backend is not None else {})
        return self.worker

    def close(self) -> None:
        """End the worker, so that the device memory it holds is free."""
        if self.worker is not None:
            self.worker.close()
