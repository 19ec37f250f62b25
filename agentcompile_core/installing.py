"""Installing: programs get a device, a backend, kernels and runtimes, and become a session. The last step, the only one with effects."""

from .building import build_one
from .candidate import Kernel
from .context import Context
from .eager import EagerModule, EagerSession
from .errors import Reject, UsageError
from .forward import ModuleSession
from .graph import GraphSet
from .interfaces import Backend, DecodeRuntime, KVCacheRuntime, LoadedModel
from .program import Program, framework_program
from .session import Session
from .weights import WeightStore

AnySession = Session | EagerSession | ModuleSession | EagerModule


def install(loaded: LoadedModel, graphs: GraphSet, programs: dict[str, Program], kernels: dict[str, Kernel], provisional: bool,
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
    session.prepare(ctx.report)
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
    built = {digest: build_one(source, backend, ctx) for digest, source in sources.items()}
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
