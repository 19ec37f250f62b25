"""What every stage may see besides its input: the catalog, the target, the configuration, the store, and where to report."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import Factory, define, frozen

from .errors import Failure
from .target import Target

if TYPE_CHECKING:
    from .interfaces import Backend
    from .plugins import Catalog
    from .store import Store
    from .worker import Worker


@frozen(kw_only=True)
class Config:
    """The choices of one compilation; everything is by name. Unknown names are refused where they are resolved."""

    advisor: str = "heuristic"
    advisor_options: tuple[tuple[str, str], ...] = ()
    validators: tuple[str, ...] = ("numerics",)
    backend: str = ""  # empty: cuda where a GPU is, else emulation where it is installed
    kv_cache: str = ""  # empty: flashkv where it is installed, else the core's own
    decode: str = ""  # empty: cudagraph where it is installed and a GPU is there, else python_loop
    origins: tuple[str, ...] = ("generated", "handwritten", "third_party")
    budget_s: float = 90.0
    budget_plans: int = 400
    rounds: int = 2
    margin: float = 0.01  # a candidate must beat its baseline by this share beyond the noise
    seed: int = 0


@define(kw_only=True)
class Context:
    """Handed to every stage. The lists only grow; stages return their results, they do not leave them here."""

    catalog: "Catalog"
    target: Target
    config: Config
    store: "Store"
    backend: "Backend | None" = None
    worker: "Worker | None" = None  # started by the first stage that needs it
    failures: list[Failure] = Factory(list)
    report: Callable[[str, dict[str, Any]], None] = lambda event, facts: None  # progress: event name and facts

    def fail(self, failure: Failure) -> None:
        """Record a failure and tell whoever watches."""
        self.failures.append(failure)
        self.report("failure", {"failure": str(failure)})

    def close(self) -> None:
        """End the worker, so that the device memory it holds is free."""
        if self.worker is not None:
            self.worker.close()
