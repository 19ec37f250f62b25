"""What a run needs before a model is opened: configured plugins, the hardware that was chosen, and the store."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..configuration import Config
from ..context import Context
from ..errors import StageName
from ..plugin import settings
from ..plugin.catalog import Catalog
from ..plugin.events import Observer, Skipped, Warned
from ..plugin.interfaces import Backend, Frontend
from ..store import Store, default_root, keys
from . import arguments
from .hardware import Hardware

ASKED_S = 10.0  # for a compiler to say who it is, beside loading and behind it; it is asked again where the answer is needed


@contextmanager
def compiler_asked(backend: Backend | None, frontend: Frontend) -> Iterator[None]:
    """A block, in which ``frontend`` loads, beside which ``backend`` is asked for its compiler, which others ask later.

    Bindings of a compiler take a quarter of a second of Python to import, which reading weights from a disk leaves free. Not beside a
    file of the user's, whose folder Python looks for modules in while it runs.
    """
    thread = None

    def ask() -> None:
        with suppress(BaseException):  # told to whoever asks for it later
            assert backend is not None
            backend.compiler()

    if backend is not None and not frontend.runs_files:
        with suppress(RuntimeError):  # there are too many threads
            thread = threading.Thread(target=ask, name="which compiler", daemon=True)
            thread.start()
    yield
    if thread is not None and thread.ident is not None:
        thread.join(ASKED_S)


def without_unknown_backend(ctx: Context) -> None:
    """Do without a backend that cannot say what its results depend on: a recorded failure; nothing is judged, and the framework runs."""
    backend = ctx.backend
    if backend is not None and ctx.catalog.guard(lambda: keys.environment(backend), stage=StageName.VALIDATE, plugin=backend.name,
                                                 subject="its compiler, device and libraries") is None:
        ctx.backend = None


def context(catalog: Catalog, config: Config, found: Hardware, store: Store | None, report: Observer) -> Context:
    """The context of one run on the hardware that was found: configured plugins, target, store, backend.

    Raises:
        UsageError: the configuration names what is not installed, or sets what no plugin takes.
    """
    arguments.check_choices(config, catalog)
    catalog, unused = settings.configured(catalog.for_one_run(report), config)
    backend = catalog.find("agentcompile_backends", found.backend.name) if found.backend is not None else None
    ctx = Context(catalog=catalog, target=found.target, config=config, store=store or store_of(config), backend=backend)
    for note in unused:
        ctx.emit(Skipped(subject="configuration", message=note))
    for warning in ctx.store.warnings:
        ctx.emit(Warned(message=warning))
    return ctx


def store_of(config: Config) -> Store:
    """The store that the configuration names: its folder and the most that it may hold."""
    folder = config.cache.folder
    return Store(Path(folder).expanduser() if folder else default_root(), max_bytes=config.cache.max_bytes)
