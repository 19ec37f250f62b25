"""The face: ``compile`` a model, ``load`` a bundle; both give a CompiledModel that generates."""

import platform
import weakref
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from attrs import evolve

from .. import pipeline
from ..configuration import Config
from ..context import Context
from ..errors import StageName, UsageError
from ..garbage import set_apart
from ..installation import building, install, trust
from ..ir.bundle import Bundle
from ..ir.graph import DType, GraphSet, ModelInfo, Workload
from ..ir.graph_difference import unlike_graphs
from ..pipeline import Compilation
from ..plugin.catalog import Catalog
from ..plugin.discovery import load_catalog
from ..plugin.events import Captured, ModelLoaded, Observer, StageFinished, StageStarted, WorkloadChosen, silent
from ..plugin.interfaces import Frontend, LoadedModel
from ..runtime import bundle_reader
from ..store import Store
from ..version import __version__
from . import arguments, hardware, whole_calls
from .model import CompiledModel
from .parts import Parts
from .setting_up import compiler_asked, context, without_unknown_backend

__all__ = ["CompiledModel", "compile", "load"]

DEFAULT_CONTEXT = 8192
MORE_CHUNKS, LARGEST_CHUNKS = (256, 1024, 2048), (4096, 8192)  # tokens of a prompt
RUN_ON = ("auto", "framework")
INSTALL = StageName.INSTALL.value


@set_apart()
def compile(what: object, workload: Workload | None = None, *, config: Config | None = None, catalog: Catalog | None = None,
            store: Store | None = None, report: Observer = silent, **options: Any) -> CompiledModel:
    """Compile a model: an identifier, a folder, a ``.py`` file, or a live module.

    Args:
        what: see above.
        workload: dtype, context and prefill chunks; by default the model's dtype and min(its limit, 8192) positions.
        config: advisor, budgets, validators, runtimes as one value; its fields may be given by name as well (below). With it
            neither configuration files nor environment variables are read; without it they are (docs/configuration.md).
        catalog: the plugins to use; by default every installed one.
        store: where kernels and timings are kept; by default where ``config.cache`` says, ``Store(None)`` for nowhere.
        report: an observer of events (``agentcompile_core.plugin.events``): called with each as it happens.
        run_on: ``auto`` (kernels where they were measured, the framework elsewhere), ``framework``, the name of an installed
            backend (such as ``emulation``: kernels on the CPU, slow), or ``nothing`` (the result can be saved, not run).

    Options, all by name:
        dtype: ``float16``, ``bfloat16`` or ``float32``; default: the model's own.
        max_context: positions of the KV cache; default: min(the model's limit, 8192).
        target: the name of an installed target; default: the hardware here, else the installed one of highest preference.
        device: a torch device type that an installed backend uses, or cpu; default: the target's where it is here, else cpu.
        meta: True captures without weights (nothing can be run, everything else works).
        random_weights: seed of random weights for a folder or an identifier.
        example_inputs: for a live plain module: a tuple of its arguments, or a dict of them by name.
        advisor, validators, winners, sanitize, backend, kv_cache, decode, origins, budget_s, budget_plans, rounds, margin, seed: as in
            Config; ``compile(model, advisor="replay", budget_s=30)``.

    Raises:
        UsageError: what was asked cannot be; the message says what is allowed. Nothing is loaded before the names are checked.
    """
    run_on, catalog = options.pop("run_on", "auto"), catalog or load_catalog()
    arguments.check_known(options, catalog)
    chosen, asked, rest = arguments.split(options, arguments.FIELDS, arguments.COMPILE)
    config, unused = arguments.chosen(config, chosen, catalog)
    unused = (*unused, *arguments.without_reference(config))
    arguments.check_dtype(asked.get("dtype"))
    arguments.check_context(asked.get("max_context"))
    _check_run_on(run_on, *RUN_ON, "nothing", *(b.name for b in catalog.backends.values()))
    arguments.check_sanitizer(config, catalog)
    found = hardware.choose(config, catalog, run_on=run_on)
    ctx = context(catalog, config, found, store, report)
    try:
        loaded, compilation, bundle = _compiled(what, workload, ctx, {**asked, **rest, "device": found.device}, run_on)
    finally:
        ctx.close()  # before anything is installed: the worker's memory of the device is the session's
    graphs = compilation.graphs
    if not loaded.has_weights or run_on == "nothing":
        return CompiledModel(Parts(loaded=loaded, graphs=graphs, bundle=bundle, compilation=compilation, context=ctx,
                                   notes=(*unused, *loaded.notes, *graphs.notes)))
    runnable = install.Runnable(graphs=graphs, programs=compilation.programs, kernels=compilation.kernels,
                                provisional=compilation.provisional)
    session, notes, seconds = _installed(loaded, runnable, found.device, run_on, ctx)
    compilation = evolve(compilation, seconds=(*compilation.seconds, (INSTALL, seconds)))
    return CompiledModel(Parts(loaded=loaded, graphs=graphs, session=session, bundle=bundle, compilation=compilation, context=ctx,
                               run_on=run_on, notes=(*unused, *loaded.notes, *graphs.notes, *notes)))


def _compiled(what: object, workload: Workload | None, ctx: Context, wanted: dict[str, Any],
              run_on: str) -> tuple[LoadedModel, Compilation, Callable[[], Bundle]]:
    """Load, capture and compile; and what makes the bundle, which names where the model comes from."""
    dtype, max_context = wanted.get("dtype"), wanted.pop("max_context", None)
    frontend = pipeline.frontend_for(what, ctx)
    clock: dict[str, float] = {}
    ctx.emit(StageStarted(stage="load"))
    loaded, clock["load"] = _timed(partial(_loaded, frontend, what, {**wanted, "dtype": dtype, "meta": bool(wanted.get("meta"))}, ctx))
    ctx.emit(ModelLoaded(name=loaded.name, seconds=clock["load"]))
    workload = workload or _default_workload(loaded, dtype, max_context, wanted.get("device", hardware.CPU))
    ctx.emit(WorkloadChosen(dtype=workload.dtype.value, max_context=workload.max_context, chunks=workload.prefill_chunks))
    if run_on != "nothing":
        _expect(loaded, workload.dtype, wanted["device"], ctx)
    graphs, clock["capture"] = _captured(loaded, frontend, workload, ctx)
    compilation = pipeline.compile_graphs(graphs, ctx, clock)
    emission, source = pipeline.emission(compilation, ctx), _source(what)

    @cache
    def bundle() -> Bundle:
        made = emission()
        return evolve(made, manifest=evolve(made.manifest, source=source))

    return loaded, compilation, bundle


@set_apart()
def load(folder: str | Path, model: object, *, config: Config | None = None, catalog: Catalog | None = None,
         store: Store | None = None, report: Observer = silent, **options: Any) -> CompiledModel:
    """Run a bundle with the weights of ``model`` (as for ``compile``): no tuning, nothing of it executed.

    Its graphs must be those that are captured of the model here, which takes seconds where the store does not have them; with
    ``trust_graphs=True`` they are compared with the model on a few inputs instead.
    Kernels that this user's cache knows run as they are. The others are built again from the installed families. What no record of the
    store says to have passed these checks, implementations included, is validated within ``budget_s`` before it runs; what cannot be,
    or does not pass, is left to the framework (docs/trust.md).
    ``store`` is as for ``compile``. ``options`` are the fields of Config (``trust_kernels=True`` runs kernels that were not built
    here, as they are), and what opens the model: ``random_weights``, ``example_inputs``.

    Raises:
        UsageError: the bundle is damaged, or made for another model, architecture or version.
    """
    from ..stages.capture.dependence import training_matters
    from ..stages.capture.describe import describe
    from ..stages.capture.identity import identity

    run_on, catalog = options.pop("run_on", "auto"), catalog or load_catalog()
    arguments.check_known(options, catalog)
    chosen, options = arguments.split(options, arguments.FIELDS)
    config, unused = arguments.chosen(config, chosen, catalog)
    _check_run_on(run_on, *RUN_ON, *(b.name for b in catalog.backends.values()))
    installed = bundle_reader.read(Path(folder))
    found = hardware.choose(config, catalog, installed.manifest.target, run_on)
    ctx, device = context(catalog, config, found, store, report), found.device
    reason = bundle_reader.runnable(installed, hardware.live(ctx.target, device, catalog))
    frontend = pipeline.frontend_for(model, ctx)
    ctx.emit(StageStarted(stage="load"))
    loaded = _loaded(frontend, model, {"dtype": installed.manifest.workload.dtype.value, "device": device, "meta": False, **options}, ctx)
    known = identity(loaded)
    info = describe(loaded, known)
    bundle_reader.check_model(installed, info.digest, loaded.name, known.unstable)
    if mode := training_matters(loaded):
        raise UsageError(f"{loaded.name} cannot run this bundle: {mode}")
    graphs = _graphs(folder, installed.graphs, info, loaded, frontend, ctx)
    _expect(loaded, installed.manifest.workload.dtype, device, ctx)
    programs, kernels = installed.programs, installed.kernels
    if reason and run_on == "auto":
        programs, kernels = bundle_reader.on_framework(installed), {}
    foreign = trust.Foreign(target=installed.manifest.target, judge=pipeline.judge_of(installed.selections))
    runnable = install.Runnable(graphs=graphs, programs=programs, kernels=kernels,
                                provisional=installed.manifest.provisional, foreign=foreign)
    session, notes, _ = _installed(loaded, runnable, device, run_on, ctx)
    reasons = (reason,) if reason and run_on == "auto" else ()
    return CompiledModel(Parts(loaded=loaded, graphs=graphs, session=session, context=ctx,
                               notes=(*unused, *loaded.notes, *reasons, *notes)))


def _graphs(folder: str | Path, given: GraphSet, info: ModelInfo, loaded: LoadedModel, frontend: Frontend, ctx: Context) -> GraphSet:
    """The graphs of a bundle, with the facts of the model given.

    They are those that are captured of it here, or that the store holds of it, or are only compared with it, as ``trust_graphs`` says.

    Raises:
        UsageError: they are others, or compute something else.
    """
    from ..stages.capture.comparison import difference
    from ..stages.capture.describe import of_graphs

    if given.graphs and not ctx.config.trust_graphs:
        found, _ = _captured(loaded, frontend, given.workload, ctx, worker=False)
        unlike = unlike_graphs(given, found)
        if not unlike:
            return found
        if not _is_captured_elsewhere(given, loaded, frontend, ctx):
            bundle_reader.check_captured(folder, unlike, found.eager_reason, loaded.name)
    bundle_reader.check_graphs(folder, difference(given, loaded), loaded.name)
    return of_graphs(given, info)


def _captured(loaded: LoadedModel, frontend: Frontend, workload: Workload, ctx: Context, *, worker: bool = True) -> tuple[GraphSet, float]:
    """The capture stage, said, and its seconds."""
    ctx.emit(StageStarted(stage="capture"))
    graphs, seconds = _timed(lambda: pipeline.captured(loaded, frontend, workload, ctx, _versions(), worker=worker))
    ctx.emit(Captured(graphs=len(graphs.graphs), nodes=sum(len(g.nodes) for g in graphs.graphs), eager_reason=graphs.eager_reason,
                      seconds=seconds))
    return graphs, seconds


def _is_captured_elsewhere(given: GraphSet, loaded: LoadedModel, frontend: Frontend, ctx: Context) -> bool:
    """Whether the graphs of a plain module are what is captured of a copy of it on another device.

    How operators lay out what they make depends on the device, also on the one without data (``meta``).
    """
    from ..stages.capture.elsewhere import copies

    return any(not unlike_graphs(given, pipeline.captured(one, frontend, given.workload, ctx, None, worker=False))
               for one in copies(loaded))


def _loaded(frontend: Frontend, what: object, options: dict[str, Any], ctx: Context) -> LoadedModel:
    with compiler_asked(ctx.backend, frontend):
        loaded = frontend.load(what, options)
    without_unknown_backend(ctx)
    return loaded


def _expect(loaded: LoadedModel, dtype: DType, device: str, ctx: Context) -> None:
    """Let the backend begin with what the prompts of a language model need, beside what follows, where it is to run on its device."""
    backend = ctx.backend
    if backend is not None and backend.device == device and loaded.has_weights and hasattr(loaded.module, "generate"):
        build = partial(building.stored_or_built, weakref.ref(ctx.store))  # a backend may outlive the store
        ctx.catalog.guard(lambda: backend.expect(dtype, build), stage=StageName.INSTALL, plugin=backend.name, subject="expect")


def _installed(loaded: LoadedModel, runnable: install.Runnable, device: str, run_on: str,
               ctx: Context) -> tuple[install.AnySession, tuple[str, ...], float]:
    """The session, notes for the user, and the seconds that binding, capturing and comparing with the model took."""
    def made() -> tuple[install.AnySession, tuple[str, ...]]:
        session, notes = install.install(loaded, runnable, device, run_on, ctx)
        return session, (*notes, *whole_calls.settle(session, loaded, run_on, ctx))

    ctx.emit(StageStarted(stage=INSTALL))
    (session, notes), seconds = _timed(made)
    ctx.emit(StageFinished(stage=INSTALL, seconds=seconds, facts={"programs": len(runnable.programs)}))
    return session, notes, seconds


def _source(what: object) -> str:
    """Where the model comes from, for the manifest: an absolute path, an identifier, or nothing for a live one."""
    if not isinstance(what, str | Path):
        return ""
    path = Path(what).expanduser()
    return str(path.resolve()) if path.exists() else str(what)


def _check_run_on(given: str, *allowed: str) -> None:
    if given not in allowed:
        raise UsageError(f"cannot run on {given!r}; allowed: {', '.join(allowed)}")


def _default_workload(loaded: LoadedModel, dtype: str | None, max_context: int | None, device: str) -> Workload:
    """The model's own, as asked for; more sizes of chunks only where they run on an accelerator, since each costs a capture."""
    from ..stages.capture.describe import default_workload

    workload = default_workload(loaded.module)
    if device != hardware.CPU:  # the largest where two of them fit: else few prompts have one
        context = max_context or workload.max_context
        largest = LARGEST_CHUNKS if 2 * max(LARGEST_CHUNKS) <= context else ()
        workload = evolve(workload, prefill_chunks=tuple(sorted((*workload.prefill_chunks, *MORE_CHUNKS, *largest))))
    if dtype is not None:
        workload = evolve(workload, dtype=DType(dtype))
    if max_context is not None:
        chunks = tuple(sorted({min(c, max_context) for c in workload.prefill_chunks}))
        workload = evolve(workload, max_context=max_context, prefill_chunks=chunks)
    return workload


def _versions() -> tuple[str, ...]:
    """What stands for the source of all that a capture does not look into: ``runtime.installed_packages.VERSIONED``, and Python's own."""
    import numpy
    import torch
    import transformers

    return (f"agentcompile {__version__}", f"torch {torch.__version__}", f"transformers {transformers.__version__}",
            f"numpy {numpy.__version__}", f"python {platform.python_version()}")


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    import time

    began = time.monotonic()
    return call(), time.monotonic() - began
