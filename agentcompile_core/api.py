"""The face: ``compile`` a model, ``load`` a bundle; both give a CompiledModel that generates."""

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from . import install, pipeline
from .bundle import Bundle
from .candidate import Kernel
from .context import Config, Context
from .eager import EagerModule, EagerSession
from .errors import Reject, StageName, UsageError
from .events import Captured, ModelLoaded, Observer, Warned, WorkloadChosen, silent
from .forward import ModuleSession
from .graph import DType, GraphSet, Workload
from .interfaces import Backend, DecodeRuntime, KVCacheRuntime, LoadedModel
from .pipeline import Compilation
from .plugins import Catalog, load_catalog
from .program import Program, framework_program
from .sampling import Sampling
from .session import Session
from .stages import emit
from .store import Store, default_root
from .target import Target, preset
from .version import __version__
from .weights import WeightStore

if TYPE_CHECKING:
    import torch

AnySession = Session | EagerSession | ModuleSession | EagerModule
DEFAULT_TARGET = "h200"
DEFAULT_CONTEXT = 8192
RUN_ON = ("auto", "framework", "emulation")


class CompiledModel:
    """A model that generates through its programs. ``compilation`` is None for one that was loaded from a bundle."""

    def __init__(self, *, loaded: LoadedModel, graphs: GraphSet, session: "AnySession | None", bundle: Bundle | None,
                 compilation: Compilation | None, notes: tuple[str, ...], context: Context) -> None:
        self.loaded, self.graphs, self.session = loaded, graphs, session
        self.bundle, self.compilation, self.context = bundle, compilation, context
        self.notes = tuple(dict.fromkeys((*notes, *context.store.warnings)))

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return self.loaded.tokenizer

    def generate(self, input_ids: "torch.Tensor", max_new_tokens: int = 128, *, eos_token_id: int | Sequence[int] | None = None,
                 streamer: Any = None, do_sample: bool = False, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
                 seed: int | None = None) -> "torch.Tensor":
        """Continue a prompt of int64 [1, n]; returns int64 [1, n + m] on the CPU. See Session.generate for limits and errors."""
        if self.session is None:
            raise UsageError("this model was compiled without weights or with run_on='nothing', so it cannot generate; "
                             "load its bundle, or compile it where its weights are")
        if isinstance(self.session, ModuleSession | EagerModule):
            raise UsageError(f"{self.loaded.name} is a plain module and does not generate; call the compiled object with its inputs")
        try:
            sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed) if do_sample else None
        except ValueError as exc:
            raise UsageError(f"cannot sample so: {exc}") from exc
        return self.session.generate(input_ids, max_new_tokens, eos_token_id=eos_token_id, streamer=streamer, sampling=sampling)

    def __call__(self, *inputs: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
        """Run a plain module on tensors of the shapes it was compiled for; see ModuleSession."""
        if not isinstance(self.session, ModuleSession | EagerModule):
            raise UsageError(f"{self.loaded.name} is a language model (or has no weights); use generate")
        return self.session(*inputs)

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


def compile(what: object, workload: Workload | None = None, *, dtype: str | None = None, max_context: int | None = None,
            target: str | None = None, device: str | None = None, config: Config | None = None, catalog: Catalog | None = None,
            store: Store | None = None, report: Observer = silent, meta: bool = False, run_on: str = "auto",
            **options: Any) -> CompiledModel:
    """Compile a model: an identifier, a folder, a ``.py`` file, or a live module.

    Args:
        what: see above.
        workload: dtype, context and prefill chunks; by default the model's dtype and min(its limit, 8192) positions.
        dtype: ``float16``, ``bfloat16`` or ``float32``; overrides the workload's.
        target: a preset name; by default the GPU here, else h200.
        device: ``cuda`` or ``cpu``; by default cuda where there is one.
        config: advisor, budgets, validators, runtimes.
        report: an observer of events (``agentcompile_core.events``): called with each as it happens.
        meta: capture without weights (nothing can be run, everything else works).
        run_on: ``auto`` (kernels on a GPU, the framework elsewhere), ``framework``, ``emulation`` (kernels on the CPU, slow), or
            ``nothing`` (the result can be saved, not run).

    Raises:
        UsageError: what was asked cannot be; the message says what is allowed.
    """
    _check_run_on(run_on, *RUN_ON, "nothing")
    catalog = catalog or load_catalog()
    config = config or Config()
    device = _device(device)
    ctx = _context(catalog, config, target, store, device, report)
    frontend = pipeline.frontend_for(what, ctx)
    clock: dict[str, float] = {}
    loaded, took = _timed(lambda: frontend.load(what, {"dtype": dtype, "device": device, "meta": meta, **options}))
    clock["load"] = took
    ctx.emit(ModelLoaded(name=loaded.name, seconds=took))
    workload = workload or _default_workload(loaded, dtype, max_context)
    ctx.emit(WorkloadChosen(dtype=workload.dtype.value, max_context=workload.max_context, chunks=workload.prefill_chunks))
    graphs, clock["capture"] = _timed(lambda: pipeline.captured(loaded, frontend, workload, ctx, _versions()))
    ctx.emit(Captured(graphs=len(graphs.graphs), nodes=sum(len(g.nodes) for g in graphs.graphs), eager_reason=graphs.eager_reason,
                      seconds=clock["capture"]))
    compilation = pipeline.compile_graphs(graphs, ctx, clock)
    bundle = pipeline.emitted(compilation, ctx)
    bundle = evolve(bundle, manifest=evolve(bundle.manifest, source=_source(what)))
    if not loaded.has_weights or run_on == "nothing":
        return CompiledModel(loaded=loaded, graphs=graphs, session=None, bundle=bundle, compilation=compilation,
                             notes=graphs.notes, context=ctx)
    session, notes = _install(loaded, graphs, compilation.programs, compilation.kernels, compilation.provisional, device, run_on, ctx)
    return CompiledModel(loaded=loaded, graphs=graphs, session=session, bundle=bundle, compilation=compilation,
                         notes=graphs.notes + notes, context=ctx)


def load(folder: str | Path, model: object, *, device: str | None = None, config: Config | None = None, catalog: Catalog | None = None,
         report: Observer = silent, run_on: str = "auto", **options: Any) -> CompiledModel:
    """Run a bundle with the weights of ``model`` (as for ``compile``): no capture, no compiler, no tuning, nothing of it executed.

    Raises:
        UsageError: the bundle is damaged, or made for another model, architecture or version.
    """
    from .capture.describe import describe

    _check_run_on(run_on, *RUN_ON)
    installed = install.read(Path(folder))
    catalog = catalog or load_catalog()
    device = _device(device)
    ctx = _context(catalog, config or Config(), installed.manifest.target.name, Store(None), device, report)
    reason = install.runnable(installed, _live_target(ctx) if device == "cuda" else None)
    frontend = pipeline.frontend_for(model, ctx)
    loaded = frontend.load(model, {"dtype": installed.manifest.workload.dtype.value, "device": device, "meta": False, **options})
    install.check_model(installed, describe(loaded.module, loaded.name).digest, loaded.name)
    programs, kernels = installed.programs, installed.kernels
    if reason and run_on == "auto":
        programs, kernels = install.on_framework(installed), {}
    session, notes = _install(loaded, installed.graphs, programs, kernels, installed.manifest.provisional, device, run_on, ctx)
    reasons = (reason,) if reason and run_on == "auto" else ()
    return CompiledModel(loaded=loaded, graphs=installed.graphs, session=session, bundle=None, compilation=None,
                         notes=tuple(dict.fromkeys((*reasons, *notes))), context=ctx)


def _install(loaded: LoadedModel, graphs: GraphSet, programs: dict[str, Program], kernels: dict[str, Kernel], provisional: bool,
             device: str, run_on: str, ctx: Context) -> tuple[AnySession, tuple[str, ...]]:
    """Bind programs to a device: the last step, and the only one with effects outside values."""
    if graphs.eager_reason or not graphs.graphs:
        eager = EagerSession if hasattr(loaded.module, "generate") else EagerModule
        return eager(loaded.module, graphs, device), (f"runs on the framework alone: {graphs.eager_reason or 'no decode graph'}",)
    notes: list[str] = []
    backend: Backend | None = None
    if run_on == "emulation":
        backend = ctx.catalog.find("agentcompile_backends", "emulation")
        kernels = _emulated(programs, backend, ctx)
    elif run_on == "auto" and device == "cuda" and not provisional:
        backend = next((b for b in ctx.catalog.backends.values() if b.name == "cuda"), None)
    missing = [p for p in programs.values() if any(s.digest not in kernels for s in p.sources)]
    if backend is None or missing:
        if any(s.step for p in programs.values() for s in p.segments):
            why = _why_framework(run_on, device, provisional, backend, bool(missing))
            notes.append(f"every step runs on the framework's operators: {why}")
        programs = {name: framework_program(p.graph) for name, p in programs.items()}
    if graphs.kv is None:
        module = ModuleSession(graphs, programs["forward"], WeightStore(loaded.module, device), device=device,
                               decode=_decode_runtime(ctx, "cpu", notes), backend=backend, kernels=kernels)
        return module, tuple(notes)
    kv_runtime = _kv_runtime(ctx, notes)
    session = Session(graphs, programs, WeightStore(loaded.module, device), device=device, kv_state=kv_runtime.allocate(graphs.kv, device),
                      decode=_decode_runtime(ctx, device, notes), backend=backend, kernels=kernels)
    session.prepare(ctx.emit)
    return session, tuple(notes)


def _why_framework(run_on: str, device: str, provisional: bool, backend: Backend | None, missing: bool) -> str:
    if run_on == "framework":
        return "asked for"
    if device != "cuda":
        return "no CUDA device here"
    if backend is None and not provisional:
        return "the cuda backend is not installed (agentcompile-runtime-cuda)"
    return "a kernel is missing" if missing else "the kernels were validated by emulation only and never measured"


def _emulated(programs: dict[str, Program], backend: Backend, ctx: Context) -> dict[str, Kernel]:
    sources = {s.digest: s for p in programs.values() for s in p.sources}
    built = {digest: pipeline.build_one(source, backend, ctx) for digest, source in sources.items()}
    return {digest: kernel for digest, kernel in built.items() if kernel is not None}


def _kv_runtime(ctx: Context, notes: list[str]) -> KVCacheRuntime:
    wanted = ctx.config.kv_cache
    names = (wanted,) if wanted else ("flashkv", "plain")
    for runtime in ctx.catalog.runtimes.values():
        if isinstance(runtime, KVCacheRuntime) and runtime.name == names[0]:
            return runtime
    if wanted:
        ctx.catalog.find("agentcompile_runtimes", wanted)
        raise UsageError(f"runtime {wanted!r} is no KV cache runtime")
    notes.append("KV cache: the core's own (agentcompile-runtime-flashkv is not installed)")
    return next(r for r in ctx.catalog.runtimes.values() if isinstance(r, KVCacheRuntime) and r.name == "plain")


def _decode_runtime(ctx: Context, device: str, notes: list[str]) -> DecodeRuntime:
    wanted = ctx.config.decode
    found = {r.name: r for r in ctx.catalog.runtimes.values() if isinstance(r, DecodeRuntime)}
    if wanted:
        if wanted not in found:
            raise UsageError(f"unknown decode runtime {wanted!r}; installed: {', '.join(sorted(found))}")
        answer = found[wanted].available(device)
        if isinstance(answer, Reject):
            raise UsageError(f"decode runtime {wanted!r} cannot run here: {answer.reason}")
        return found[wanted]
    if device == "cuda":
        if "cudagraph" in found and found["cudagraph"].available(device):
            return found["cudagraph"]
        notes.append("decode: a Python loop (agentcompile-runtime-cudagraph is not installed)")
    return found["python_loop"]


def _context(catalog: Catalog, config: Config, target: str | None, store: Store | None, device: str, report: Observer) -> Context:
    catalog = catalog.for_one_run(report)
    ctx = Context(catalog=catalog, target=preset(target or DEFAULT_TARGET), config=config, store=store or Store(default_root()))
    for warning in ctx.store.warnings:
        ctx.emit(Warned(message=warning))
    live = _live_target(ctx) if device == "cuda" else None
    if live is not None and target is None:
        ctx.target = live
    ctx.backend = _validation_backend(ctx, device)
    catalog.find("agentcompile_advisors", config.advisor)
    for name in config.validators:
        if not any(v.name == name for v in catalog.validators.values()) and name != "numerics":
            catalog.find("agentcompile_validators", name)
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


def _live_target(ctx: Context) -> Target | None:
    backend = next((b for b in ctx.catalog.backends.values() if b.name == "cuda"), None)
    if backend is not None:
        return ctx.catalog.guard(backend.live_target, stage=StageName.LOAD, plugin=backend.name, subject="live target")
    return None


def _device(device: str | None) -> str:
    import torch

    if device not in (None, "cuda", "cpu"):
        raise UsageError(f"unknown device {device!r}; allowed: cuda, cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("a CUDA device was asked for and there is none here; use --device cpu, or run where there is a GPU")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


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
    from .capture.describe import default_workload

    workload = default_workload(loaded.module)
    if dtype is not None:
        workload = evolve(workload, dtype=_dtype(dtype))
    if max_context is not None:
        if max_context < 2:
            raise UsageError(f"a context of {max_context}; it must hold at least 2 tokens")
        chunks = tuple(sorted({min(c, max_context) for c in workload.prefill_chunks}))
        workload = evolve(workload, max_context=max_context, prefill_chunks=chunks)
    return workload


def _dtype(name: str) -> DType:
    allowed = [DType.F16.value, DType.BF16.value, DType.F32.value]
    if name not in allowed:
        raise UsageError(f"unknown dtype {name!r}; allowed: {', '.join(allowed)}")
    return DType(name)


def _versions() -> tuple[str, ...]:
    import torch
    import transformers

    return (f"agentcompile {__version__}", f"torch {torch.__version__}", f"transformers {transformers.__version__}",
            f"python {platform.python_version()}")


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    import time

    began = time.monotonic()
    return call(), time.monotonic() - began
