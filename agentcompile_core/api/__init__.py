"""The face: ``compile`` a model, ``load`` a bundle; both give a CompiledModel that generates."""

import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import evolve

from .. import pipeline
from ..configuration import Config
from ..context import Context
from ..errors import UsageError
from ..installation import install
from ..ir.bundle import Bundle
from ..ir.graph import DType, GraphSet, Workload
from ..pipeline import Compilation
from ..plugin.catalog import Catalog
from ..plugin.discovery import load_catalog
from ..plugin.events import Captured, ModelLoaded, Observer, Warned, WorkloadChosen, silent
from ..plugin.interfaces import LoadedModel
from ..runtime import bundle_reader, calls, generation
from ..runtime.framework_session import EagerModule, EagerSession
from ..runtime.module_session import ModuleSession
from ..stages import emit
from ..store import Store, default_root
from ..version import __version__
from . import arguments, hardware

DEFAULT_CONTEXT = 8192
RUN_ON = ("auto", "framework")


class CompiledModel:
    """A model that generates through its programs. ``compilation`` is None for one that was loaded from a bundle."""

    def __init__(self, *, loaded: LoadedModel, graphs: GraphSet, session: "install.AnySession | None", bundle: Bundle | None,
                 compilation: Compilation | None, notes: tuple[str, ...], context: Context) -> None:
        self.loaded, self.graphs, self.session = loaded, graphs, session
        self.bundle, self.compilation, self.context = bundle, compilation, context
        self.notes = tuple(dict.fromkeys((*notes, *context.store.warnings)))

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return self.loaded.tokenizer

    def generate(self, input_ids: Any = None, max_new_tokens: int | None = None, *, attention_mask: Any = None, streamer: Any = None,
                 seed: int | None = None, **options: Any) -> Any:
        """Continue a prompt as transformers' ``generate`` does with the same arguments.

        Args:
            input_ids: one prompt, int64 [1, n] (or its ids as a list or one dimension). A model that was not captured takes its
                main input as transformers does: token ids for the encoder of T5 and BART, input_features for Whisper.
            max_new_tokens: at most this many; None: what the model's ``generation_config`` says, else 128 or what fits the context.
            attention_mask: all ones, as tokenizers return it for one prompt.
            streamer: object with ``put`` and ``end`` like transformers' streamers.
            seed: of the random numbers where ``do_sample`` holds; the same as ``torch.manual_seed(seed)`` before transformers' own.
            options: anything of transformers' GenerationConfig, on top of the model's ``generation_config``: ``do_sample``,
                ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``eos_token_id``, ... Without
                ``eos_token_id`` that of ``generation_config`` ends the request; None, an empty list or -1: nothing does.

        Returns:
            int64 [1, n + m] on the CPU, m <= max_new_tokens; what transformers returns where its own loop runs the request (which
            a warning and ``notes`` say).

        Raises:
            UsageError: no such request is possible; see Session.generate and the module generation.
        """
        if isinstance(self.session, ModuleSession | EagerModule):
            raise UsageError(f"{self.loaded.name} is a plain module and does not generate; call the compiled object with its inputs")
        if self.session is None:
            raise UsageError("this model was compiled without weights or with run_on='nothing', so it cannot generate; "
                             "load its bundle, or compile it where its weights are")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise UsageError(f"seed is {seed!r}; it must be an integer")
        if isinstance(self.session, EagerSession):
            masked = {} if attention_mask is None else {"attention_mask": attention_mask}
            return self.session.generate(input_ids, max_new_tokens, streamer=streamer, seed=seed, **masked, **options)
        module = self.loaded.module
        prompt = generation.prompt_of(input_ids, self.graphs.model.vocab_size)
        wanted = generation.request(module, prompt, max_new_tokens, attention_mask, options, self.session.max_context)
        generation.check_length(prompt.shape[1], wanted.count, self.session.max_context)
        for note in wanted.notes:
            self._say(note)
        if not wanted.handed_over:
            return generation.by_session(module, self.session, wanted, seed=seed, streamer=streamer)
        self._say(f"transformers' own loop runs this request, without kernels: {wanted.handed_over}")
        with self.session.exclusive():
            return generation.by_framework(module, prompt.to(self.session.device), wanted.count, wanted.options, seed=seed,
                                           streamer=streamer)

    def _say(self, note: str) -> None:
        """One sentence about a request: a Python warning, and once among ``notes``."""
        self.notes = tuple(dict.fromkeys((*self.notes, note)))
        warnings.warn(note, UserWarning, stacklevel=3)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run a plain module: what ``module(*args, **keywords)`` returns, for arguments of the shapes and types it was compiled for.

        Raises:
            UsageError: it is a language model, or the arguments differ from those of the capture; see forward.ModuleSession.
        """
        if not isinstance(self.session, ModuleSession | EagerModule):
            raise UsageError(f"{self.loaded.name} is a language model (or has no weights); use generate")
        args, keywords = calls.canonical(self.loaded.module, args, keywords)
        return self.session(*args, **keywords)

    def save(self, folder: str | Path) -> Path:
        """Write the bundle as ``folder``; see stages.emit.write."""
        if self.bundle is None:
            raise UsageError("this model was loaded from a bundle already; copy that folder")
        emit.write(self.bundle, Path(folder))
        return Path(folder)

    @property
    def statistics(self) -> dict[str, Any]:
        """The pipeline's counts."""
        return pipeline.statistics(self.compilation, self.bundle) if self.compilation else {}


def compile(what: object, workload: Workload | None = None, *, config: Config | None = None, catalog: Catalog | None = None,
            store: Store | None = None, report: Observer = silent, run_on: str = "auto", **options: Any) -> CompiledModel:
    """Compile a model: an identifier, a folder, a ``.py`` file, or a live module.

    Args:
        what: see above.
        workload: dtype, context and prefill chunks; by default the model's dtype and min(its limit, 8192) positions.
        config: advisor, budgets, validators, runtimes as one value; its fields may be given by name as well (below).
        catalog: the plugins to use; by default every installed one.
        store: where kernels and timings are kept; by default the user's cache folder, ``Store(None)`` for nowhere.
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
        advisor, validators, backend, kv_cache, decode, origins, budget_s, budget_plans, rounds, margin, seed: as in
            Config; ``compile(model, advisor="replay", budget_s=30)``.

    Raises:
        UsageError: what was asked cannot be; the message says what is allowed. Nothing is loaded before the names are checked.
    """
    catalog = catalog or load_catalog()
    arguments.check_known(options, catalog)
    chosen, asked, rest = arguments.split(options, arguments.FIELDS, arguments.COMPILE)
    config = arguments.configuration(config, chosen)
    arguments.check_dtype(asked.get("dtype"))
    arguments.check_context(asked.get("max_context"))
    _check_run_on(run_on, *RUN_ON, "nothing", *(b.name for b in catalog.backends.values()))
    ctx, device = _context(catalog, config, hardware.choose(config, catalog), store, report)
    frontend = pipeline.frontend_for(what, ctx)
    clock: dict[str, float] = {}
    wanted = {"dtype": asked.get("dtype"), "device": device, "meta": bool(asked.get("meta")), **rest}
    loaded, took = _timed(lambda: frontend.load(what, wanted))
    clock["load"] = took
    ctx.emit(ModelLoaded(name=loaded.name, seconds=took))
    workload = workload or _default_workload(loaded, asked.get("dtype"), asked.get("max_context"))
    ctx.emit(WorkloadChosen(dtype=workload.dtype.value, max_context=workload.max_context, chunks=workload.prefill_chunks))
    graphs, clock["capture"] = _timed(lambda: pipeline.captured(loaded, frontend, workload, ctx, _versions()))
    ctx.emit(Captured(graphs=len(graphs.graphs), nodes=sum(len(g.nodes) for g in graphs.graphs), eager_reason=graphs.eager_reason,
                      seconds=clock["capture"]))
    compilation = pipeline.compile_graphs(graphs, ctx, clock)
    bundle = pipeline.emitted(compilation, ctx)
    bundle = evolve(bundle, manifest=evolve(bundle.manifest, source=_source(what)))
    if not loaded.has_weights or run_on == "nothing":
        return CompiledModel(loaded=loaded, graphs=graphs, session=None, bundle=bundle, compilation=compilation,
                             notes=(*loaded.notes, *graphs.notes), context=ctx)
    runnable = install.Runnable(graphs=graphs, programs=compilation.programs, kernels=compilation.kernels,
                                   provisional=compilation.provisional)
    session, notes = install.install(loaded, runnable, device, run_on, ctx)
    return CompiledModel(loaded=loaded, graphs=graphs, session=session, bundle=bundle, compilation=compilation,
                         notes=(*loaded.notes, *graphs.notes, *notes), context=ctx)


def load(folder: str | Path, model: object, *, config: Config | None = None, catalog: Catalog | None = None,
         report: Observer = silent, run_on: str = "auto", **options: Any) -> CompiledModel:
    """Run a bundle with the weights of ``model`` (as for ``compile``): no capture, no compiler, no tuning, nothing of it executed.

    ``options`` are the fields of Config, and what opens the model: ``random_weights``, ``example_inputs``.

    Raises:
        UsageError: the bundle is damaged, or made for another model, architecture or version.
    """
    from ..stages.capture.comparison import difference
    from ..stages.capture.describe import describe

    catalog = catalog or load_catalog()
    arguments.check_known(options, catalog)
    chosen, options = arguments.split(options, arguments.FIELDS)
    config = arguments.configuration(config, chosen)
    _check_run_on(run_on, *RUN_ON, *(b.name for b in catalog.backends.values()))
    installed = bundle_reader.read(Path(folder))
    ctx, device = _context(catalog, config, hardware.choose(config, catalog, installed.manifest.target), Store(None), report)
    reason = bundle_reader.runnable(installed, hardware.live(ctx.target, device, catalog))
    frontend = pipeline.frontend_for(model, ctx)
    loaded = frontend.load(model, {"dtype": installed.manifest.workload.dtype.value, "device": device, "meta": False, **options})
    bundle_reader.check_model(installed, describe(loaded).digest, loaded.name)
    bundle_reader.check_graphs(folder, difference(installed.graphs, loaded), loaded.name)
    programs, kernels = installed.programs, installed.kernels
    if reason and run_on == "auto":
        programs, kernels = bundle_reader.on_framework(installed), {}
    runnable = install.Runnable(graphs=installed.graphs, programs=programs, kernels=kernels,
                                   provisional=installed.manifest.provisional)
    session, notes = install.install(loaded, runnable, device, run_on, ctx)
    reasons = (reason,) if reason and run_on == "auto" else ()
    return CompiledModel(loaded=loaded, graphs=installed.graphs, session=session, bundle=None, compilation=None,
                         notes=tuple(dict.fromkeys((*loaded.notes, *reasons, *notes))), context=ctx)


def _context(catalog: Catalog, config: Config, found: hardware.Hardware, store: Store | None, report: Observer) -> tuple[Context, str]:
    arguments.check_choices(config, catalog)
    ctx = Context(catalog=catalog.for_one_run(report), target=found.target, config=config, store=store or Store(default_root()),
                  backend=found.backend)
    for warning in ctx.store.warnings:
        ctx.emit(Warned(message=warning))
    return ctx, found.device


def _source(what: object) -> str:
    """Where the model comes from, for the manifest: an absolute path, an identifier, or nothing for a live one."""
    if not isinstance(what, str | Path):
        return ""
    path = Path(what).expanduser()
    return str(path.resolve()) if path.exists() else str(what)


def _check_run_on(given: str, *allowed: str) -> None:
    if given not in allowed:
        raise UsageError(f"cannot run on {given!r}; allowed: {', '.join(allowed)}")


def _default_workload(loaded: LoadedModel, dtype: str | None, max_context: int | None) -> Workload:
    from ..stages.capture.describe import default_workload

    workload = default_workload(loaded.module)
    if dtype is not None:
        workload = evolve(workload, dtype=DType(dtype))
    if max_context is not None:
        chunks = tuple(sorted({min(c, max_context) for c in workload.prefill_chunks}))
        workload = evolve(workload, max_context=max_context, prefill_chunks=chunks)
    return workload


def _versions() -> tuple[str, ...]:
    import torch
    import transformers

    return (f"agentcompile {__version__}", f"torch {torch.__version__}", f"transformers {transformers.__version__}",
            f"python {platform.python_version()}")


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    import time

    began = time.monotonic()
    return call(), time.monotonic() - began
