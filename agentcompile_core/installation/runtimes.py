"""Which runtimes a session gets, of those that are installed; one that fails is recorded, and the core's own takes its place."""

from collections.abc import Sequence
from typing import Literal, TypeVar

from ..context import Context
from ..errors import Cause, Failure, Reject, StageName, UsageError, bounded
from ..ir.graph import KVSpec
from ..plugin.interfaces import DecodeRuntime, KVCacheRuntime
from ..plugin.reserving import Reserved
from ..plugin.running import KVState
from ..runtime.built_in import CORES_OWN, PlainKVCache, PythonLoop
from ..runtime.executables import Executables
from . import kv_state as checks
from .guarded_decode import GuardedDecode

R = TypeVar("R", KVCacheRuntime, DecodeRuntime)
CACHE = "KV cache"


def kv_state(kv: KVSpec, executables: Executables, ctx: Context, notes: list[str]) -> KVState:
    """The cache of one session, or of one row; the core's own where a runtime fails, or allocates another one than was asked for.

    Raises:
        UsageError: the runtime says that there is not enough memory for it.
        torch.OutOfMemoryError: there is not.
    """
    runtime = _kv_runtime(ctx, notes)
    state, cause, why = _allocated(runtime, kv, executables, ctx, notes)
    if state is not None:
        checks.take(state, runtime.name)
        return state
    ctx.fail(Failure(stage=StageName.INSTALL, cause=cause, plugin=runtime.name, subject=CACHE, message=why))
    notes.append(f"{CACHE}: the core's own, since {runtime.name} {why}")
    own = PlainKVCache().allocate(kv, executables.device)
    checks.take(own, PlainKVCache.name)
    return own


def _allocated(runtime: KVCacheRuntime, kv: KVSpec, executables: Executables, ctx: Context,
               notes: list[str]) -> tuple[KVState | None, Cause, str]:
    """What ``runtime`` allocates; None, and the class and one clause of what is wrong with it."""
    import torch

    try:
        state = _asked(runtime, kv, executables, ctx, notes)
        why = checks.wrong_with(state, kv, executables.device)
        return None if why else state, Cause.CONTRACT, why
    except (UsageError, torch.OutOfMemoryError):
        raise  # memory that is not there is no fault of whoever asked for it
    except (Exception, SystemExit) as exc:
        if runtime.preference <= CORES_OWN or ctx.catalog.strict:
            raise
        return None, Cause.EXCEPTION, bounded(f"raised {type(exc).__name__}: {exc}")


def _asked(runtime: KVCacheRuntime, kv: KVSpec, executables: Executables, ctx: Context, notes: list[str]) -> KVState:
    """What ``runtime`` allocates, which may grow where the device's backend reserves addresses."""
    backend = executables.backend
    if backend is None or backend.device != executables.device:
        return runtime.allocate(kv, executables.device)

    def reserve(nbytes: Sequence[int]) -> Reserved | Reject:
        found = ctx.catalog.guard(lambda: backend.reserve(nbytes), stage=StageName.INSTALL, plugin=backend.name, subject="reserve")
        answer = found if found is not None else Reject(f"reserving addresses failed in the backend {backend.name}")
        if isinstance(answer, Reject):
            notes.append(f"{CACHE}: memory for all {kv.capacity} positions is taken at once: {answer.reason}")
        return answer

    return runtime.allocate_growing(kv, executables.device, reserve)


def _kv_runtime(ctx: Context, notes: list[str]) -> KVCacheRuntime:
    found = sorted((r for r in ctx.catalog.runtimes.values() if isinstance(r, KVCacheRuntime)), key=lambda r: -r.preference)
    wanted = ctx.config.kv_cache
    if wanted:
        return _called(wanted, found, CACHE)
    if found[0].preference <= CORES_OWN:
        notes.append(f"{CACHE}: the core's own (no plugin for KV caches is installed)")
    return found[0]


def _called(wanted: str, found: list[R], what: str) -> R:
    named = [runtime for runtime in found if runtime.name == wanted]
    if not named:
        raise UsageError(f"unknown {what} runtime {wanted!r}; installed: {', '.join(sorted(r.name for r in found))}")
    return named[0]


def _usable(runtime: DecodeRuntime, executables: Executables, ctx: Context) -> Literal[True] | Reject | None:
    """Whether ``runtime`` works here; None: it raised, or answered neither (recorded)."""
    backend, device = executables.backend, executables.device
    if runtime.needs_capture and (backend is None or not backend.captures):
        return Reject(f"it captures programs, and no backend that is installed and works here captures on the device {device}")
    answered: list[object] = []
    ctx.catalog.guard(lambda: answered.append(runtime.available(device)), stage=StageName.INSTALL, plugin=runtime.name, subject="available")
    for answer in answered:
        if answer is True or isinstance(answer, Reject):
            return answer  # type: ignore[return-value]
        ctx.fail(Failure(stage=StageName.INSTALL, cause=Cause.CONTRACT, plugin=runtime.name, subject="available",
                         message=f"available() returned {answer!r}; allowed are True and Reject(reason)"))
    return None


def decode_runtime(ctx: Context, executables: Executables, notes: list[str]) -> DecodeRuntime:
    """What decode steps run on: the runtime that is asked for by name, else the first by preference that works here; a plugin's guarded.

    Raises:
        UsageError: the one that is asked for is not installed, or says that it cannot run here.
    """
    found = sorted((r for r in ctx.catalog.runtimes.values() if isinstance(r, DecodeRuntime)), key=lambda r: -r.preference)
    wanted = ctx.config.decode
    if wanted:
        found = [_called(wanted, found, "decode"), PythonLoop()]
    answers: list[Reject] = []
    for runtime in found:
        answer = _usable(runtime, executables, ctx)
        if answer is True:
            break
        if wanted and isinstance(answer, Reject):
            raise UsageError(f"decode runtime {wanted!r} cannot run here: {answer.reason}")
        answers.append(answer if isinstance(answer, Reject) else Reject(f"{runtime.name} does not say whether it works here"))
    if runtime.preference > CORES_OWN:
        return GuardedDecode(runtime, ctx, notes)
    if executables.device != "cpu" or (wanted and answers):
        notes.append(f"decode: a Python loop ({answers[0].reason if answers else 'no plugin for decode steps is installed'})")
    return runtime
