"""Installing: programs get a device, a backend, kernels, callables and runtimes, and become a session. The only step with effects."""

from collections import Counter
from collections.abc import Mapping
from functools import partial

from attrs import evolve, field, frozen

from ..context import Context
from ..errors import Cause, ContractError, Failure, StageName, UsageError, last_frames
from ..ir.candidate import Kernel
from ..ir.graph import GraphSet
from ..ir.region import Match
from ..ops.dtypes import zeros
from ..plugin.interfaces import Backend, LoadedModel
from ..runtime.device import release_cache
from ..runtime.executables import BoundCall, Executables, bind_call, call_key
from ..runtime.framework_session import EagerModule, EagerSession
from ..runtime.make_program import without_steps
from ..runtime.module_session import ModuleSession
from ..runtime.program import Program, Segment, framework_program
from ..runtime.session import Session
from ..runtime.weights import WeightStore
from . import program_check, runtimes, trust
from .building import build_one

AnySession = Session | EagerSession | ModuleSession | EagerModule
Programs = dict[str, Program]


@frozen(kw_only=True)
class Runnable:
    """What is to be installed, from a compilation or a bundle.

    ``provisional``: its steps were validated, never measured. ``foreign``: of a bundle, whose kernels are not believed; None for a
    compilation of this process.
    """

    graphs: GraphSet
    programs: Programs
    kernels: Mapping[str, Kernel] = field(factory=dict, repr=False)
    provisional: bool = False
    foreign: trust.Foreign | None = None


def install(loaded: LoadedModel, what: Runnable, device: str, run_on: str, ctx: Context,
            shared: WeightStore | None = None) -> tuple[AnySession, tuple[str, ...]]:
    """Bind programs to a device; returns the session and notes for the user (what runs on the framework, and why).

    ``shared``: the weights of a session of the same module that stays in use. A store of its own would move what that one reads.
    """
    graphs = what.graphs
    if graphs.eager_reason or not graphs.graphs:
        eager = (EagerSession(loaded.module, graphs, device, capturing(device, ctx)) if hasattr(loaded.module, "generate")
                 else EagerModule(loaded.module, graphs, device))
        return eager, (f"runs on the framework alone: {graphs.eager_reason or 'no decode graph'}",)
    notes: list[str] = []
    programs, executables = _executables(what, device, run_on, ctx, notes)
    weights = shared if shared is not None else WeightStore(loaded.module, device)
    session, wrong = _checked(loaded, graphs, programs, weights, executables, ctx, notes)
    if session is not None:
        return session, tuple(notes)
    ctx.fail(Failure(stage=StageName.INSTALL, cause=Cause.TOLERANCE, plugin="core", subject=loaded.name, message=wrong))
    del weights  # the memory of its cache, before another one is made
    again, _ = install(loaded, what, device, "framework", ctx, shared)
    return again, (*notes, f"every step runs on the framework's operators: the program of kernels {wrong}")


def _checked(loaded: LoadedModel, graphs: GraphSet, programs: Programs, weights: WeightStore, executables: Executables, ctx: Context,
             notes: list[str]) -> tuple[Session | ModuleSession | None, str]:
    """The session, or None and one clause on what is wrong with its kernels: how far off it is, or what they raised."""
    try:
        session = _session(graphs, programs, weights, executables, ctx, notes)
        wrong = program_check.difference(session, programs, weights, loaded, notes) if _has_steps(programs) else ""
        if wrong:
            return None, f"is beyond the error budget, {wrong}"
        unlike = _unlike(session, programs, weights, executables, notes)
        if not unlike:
            return session, ""
        name = executables.backend.name if executables.backend is not None else "core"
        ctx.fail(Failure(stage=StageName.INSTALL, cause=Cause.TOLERANCE, plugin=name, subject=loaded.name, message=unlike))
        notes.append(f"prompts: chunks attend over the whole cache by the framework's operators, since what the backend {name} brings "
                     f"for prompts is not right here: {unlike}")
        del session  # the memory of its cache, before another one is made
        return _session(graphs, programs, weights, evolve(executables, prefill="capacity"), ctx, []), ""
    except UsageError:
        raise
    except (Exception, SystemExit) as exc:
        if not _has_steps(programs):
            raise
        return None, f"raised {type(exc).__name__}: {exc}"


def _unlike(session: Session | ModuleSession, programs: Programs, weights: WeightStore, executables: Executables, notes: list[str]) -> str:
    """One clause on what is wrong with the libraries and kernels by which a backend reads prompts; empty where it brings none."""
    import torch

    backend = executables.backend
    if not isinstance(session, Session) or backend is None or not backend.captures or executables.prefill != "live":
        return ""
    try:
        return program_check.difference_of_prompts(session, programs, weights, notes)
    except torch.OutOfMemoryError:
        notes.append("prompts: what reads them was not compared with the framework's operators, for lack of memory")
        return ""
    except (Exception, SystemExit) as exc:
        return f"raised {type(exc).__name__}: {exc}"
    finally:
        release_cache()  # what was compared


def _session(graphs: GraphSet, programs: Programs, weights: WeightStore, executables: Executables, ctx: Context,
             notes: list[str]) -> Session | ModuleSession:
    if graphs.kv is None:
        return ModuleSession(graphs, programs["forward"], weights, executables)
    kv_state = runtimes.kv_state(graphs.kv, executables, ctx, notes)
    session = Session(graphs, programs, weights, executables, kv_state=kv_state, decode=runtimes.decode_runtime(ctx, executables, notes),
                      steps_per_graph=ctx.config.steps_per_graph)
    session.rows.another_kv = partial(runtimes.kv_state, graphs.kv, executables, ctx, [])
    if executables.prefill != "live":
        notes.append(f"prompts: chunks attend over all {graphs.kv.capacity} rows of the cache under a mask, as prefill = "
                     f"{executables.prefill!r} asks")
    left_out = session.prepare(ctx.emit)
    if left_out:
        notes.append(f"prompts: chunks of {', '.join(map(str, left_out))} tokens need more memory than there is; smaller ones do that")
    return session


def _has_steps(programs: Programs) -> bool:
    return any(s.step for p in programs.values() for s in p.segments)


def _executables(what: Runnable, device: str, run_on: str, ctx: Context, notes: list[str]) -> tuple[Programs, Executables]:
    backend = _backend(what, device, run_on, ctx)
    if backend is not None and what.foreign is not None and _has_steps(what.programs):
        trusted = trust.decide(what.programs, what.kernels, what.foreign, backend, ctx)
        notes += trusted.notes
        what = evolve(what, programs=trusted.programs, kernels=trusted.kernels, foreign=None)
        kernels: Mapping[str, Kernel] = trusted.kernels
    else:
        kernels = _built_by(backend, what, ctx) if backend is not None and run_on != "auto" else what.kernels
    missing = [p for p in what.programs.values() if any(s.digest not in kernels for s in p.sources)]
    if backend is not None and not missing:
        executables = Executables(device=device, backend=backend, kernels=kernels, prefill=ctx.config.prefill)
        return with_calls(what.programs, executables, ctx, notes)
    if _has_steps(what.programs):
        why = _why_framework(device, run_on, bool(missing), ctx)
        notes.append(f"every step runs on the framework's operators: {why}")
    programs = {p.graph.name: framework_program(p.graph) for p in what.programs.values()}
    return programs, Executables(device=device, backend=capturing(device, ctx), prefill=ctx.config.prefill)


def _backend(what: Runnable, device: str, run_on: str, ctx: Context) -> Backend | None:
    """Who launches the kernels: the backend that measured them, or the one that is named."""
    if run_on == "framework" or (run_on == "auto" and what.provisional):
        return None
    if run_on == "auto":
        measured_on = _measured_on(what, ctx)
        return measured_on if measured_on is not None and measured_on.device == device else None
    backend: Backend = ctx.catalog.find("agentcompile_backends", run_on)
    if backend.device != device:
        raise UsageError(f"the backend {run_on} runs on the device {backend.device}, not on {device}; use --device {backend.device}")
    return backend


def _measured_on(what: Runnable, ctx: Context) -> Backend | None:
    names = {kernel.backend for kernel in what.kernels.values()}
    if len(names) == 1:
        return next((b for b in ctx.catalog.backends.values() if b.name in names), None)
    return None if names else ctx.catalog.backend_of(ctx.target)


def with_calls(programs: Programs, executables: Executables, ctx: Context, notes: list[str]) -> tuple[Programs, Executables]:
    """Bind the steps that implementations serve; the nodes of those that cannot be bound go to the framework.

    Every one that cannot is a recorded failure, and a note per implementation and reason.
    """
    calls: dict[str, BoundCall] = {}
    lost: dict[str, str] = {}
    for segment in (s for p in programs.values() for s in p.segments if s.is_call):
        key = _key(segment)
        if key not in calls and key not in lost:
            found = _bound(segment, executables.device, ctx)
            if isinstance(found, BoundCall):
                calls[key] = found
            else:
                lost[key] = found
    executables = evolve(executables, calls=calls)
    if not lost:
        return programs, executables
    for reason, count in Counter(lost.values()).items():
        notes.append(f"{reason}: the nodes of {count} step{'s' if count > 1 else ''} run on the framework's operators")
    return {name: without_steps(p, lambda s: s.is_call and _key(s) in lost) for name, p in programs.items()}, executables


def _key(segment: Segment) -> str:
    assert segment.step is not None and segment.match is not None
    return call_key(segment.step, segment.version, segment.match)


def _bound(segment: Segment, device: str, ctx: Context) -> BoundCall | str:
    """The bound callable of a step, or one line that says why there is none (recorded)."""
    step, match, what = segment.step, segment.match, "bind()"
    assert step is not None and match is not None
    try:
        call = bind_call(step, match, ctx.catalog, ctx.target, segment.version)
        what = "its first run"
        _try(call, match, device)
        return call
    except (Exception, SystemExit) as exc:
        is_contract = isinstance(exc, ContractError)
        reason = str(exc) if is_contract else f"{step.implementation}: {what} raised {type(exc).__name__}: {exc}"
        cause = Cause.CONTRACT if is_contract else Cause.EXCEPTION
        ctx.fail(Failure(stage=StageName.INSTALL, cause=cause, plugin=step.implementation, subject=str(step), message=reason[:2000],
                         traceback=last_frames(exc)))
        return reason.splitlines()[0][:300]


def _try(call: BoundCall, match: Match, device: str) -> None:
    """Run it once on zeros: what it loads or compiles late fails here, where the framework can still take over."""
    import torch

    with torch.no_grad():
        call.run(**{o.name: zeros(o.spec, device) for o in match.operands})
    if device != "cpu":
        torch.accelerator.synchronize()


def _why_framework(device: str, run_on: str, missing: bool, ctx: Context) -> str:
    own, target = ctx.catalog.backend_of(ctx.target), ctx.target
    if run_on == "framework":
        return "asked for"
    if own is None:
        return f"the backend {target.backend} of {target.name} is not installed" if target.backend else "no hardware target is installed"
    if own.device != device:
        return f"no {target.name} here"
    return "a kernel is missing" if missing else "the kernels were validated without their hardware and never measured"


def _built_by(backend: Backend, what: Runnable, ctx: Context) -> dict[str, Kernel]:
    """Kernels of every source by ``backend``: those that it built already, the others built now."""
    sources = {s.digest: s for p in what.programs.values() for s in p.sources}
    ready = {digest: kernel for digest, kernel in what.kernels.items() if kernel.backend == backend.name}
    built = {digest: ready.get(digest) or build_one(source, backend, ctx) for digest, source in sources.items()}
    return {digest: kernel for digest, kernel in built.items() if kernel is not None}


def capturing(device: str, ctx: Context) -> Backend | None:
    """Who captures programs on ``device``: the backend of the run, else any that is here; None: nobody."""
    for backend in (ctx.backend, *ctx.catalog.backends.values()):
        if backend is not None and backend.captures and backend.device == device:
            answer = ctx.catalog.guard(backend.available, stage=StageName.INSTALL, plugin=backend.name, subject="available")
            if answer is True:
                return backend
    return None
