"""What a run needs before a model is opened: device, target, backend, configured plugins and the store."""

from pathlib import Path

from ..configuration import Config
from ..context import Context
from ..errors import StageName, UsageError
from ..ir.target import Target, preset
from ..plugin import settings
from ..plugin.catalog import Catalog
from ..plugin.events import Observer, Skipped, Warned
from ..plugin.interfaces import Backend
from ..store import Store, default_root
from . import arguments

DEFAULT_TARGET = "h200"


def context(catalog: Catalog, config: Config, target: str | None, store: Store | None, device: str, report: Observer) -> Context:
    """The context of one run: configured plugins, target, store, backend.

    Raises:
        UsageError: the configuration names what is not installed, or sets what no plugin takes.
    """
    arguments.check_choices(config, catalog)
    catalog, unused = settings.configured(catalog.for_one_run(report), config)
    ctx = Context(catalog=catalog, target=preset(target or DEFAULT_TARGET), config=config, store=store or store_of(config))
    for note in unused:
        ctx.emit(Skipped(subject="configuration", message=note))
    for warning in ctx.store.warnings:
        ctx.emit(Warned(message=warning))
    live = live_target(ctx) if device == "cuda" else None
    if live is not None and target is None:
        ctx.target = live
    ctx.backend = _validation_backend(ctx, device)
    return ctx


def _validation_backend(ctx: Context, device: str) -> Backend | None:
    if ctx.config.backend:
        return ctx.catalog.find("agentcompile_backends", ctx.config.backend)
    wanted = "cuda" if device == "cuda" else "emulation"
    backend = next((b for b in ctx.catalog.backends.values() if b.name == wanted), None)
    if backend is None:
        return None
    answer = ctx.catalog.guard(backend.available, stage=StageName.LOAD, plugin=backend.name, subject="available")
    return backend if answer is True else None


def live_target(ctx: Context) -> Target | None:
    """The device of this machine, where there is one."""
    backend = next((b for b in ctx.catalog.backends.values() if b.name == "cuda"), None)
    if backend is not None:
        return ctx.catalog.guard(backend.live_target, stage=StageName.LOAD, plugin=backend.name, subject="live target")
    return None


def device_of(config: Config) -> str:
    """The torch device type to run on.

    Raises:
        UsageError: there is no such device, or none here.
    """
    import torch

    device = config.device or None
    if device not in (None, "cuda", "cpu"):
        raise UsageError(f"unknown device {device!r}; allowed: cuda, cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("a CUDA device was asked for and there is none here; use --device cpu, or run where there is a GPU")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def store_of(config: Config) -> Store:
    """The store that the configuration names: its folder and the most that it may hold."""
    folder = config.cache.folder
    return Store(Path(folder).expanduser() if folder else default_root(), max_bytes=config.cache.max_bytes)
