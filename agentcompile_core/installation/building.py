"""Building: kernels of the sources of programs, from the store or from the backend that makes code for the target."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..context import Context
from ..errors import BuildError, Cause, Failure, StageName, bounded, last_frames
from ..ir.candidate import Kernel, StepSource
from ..ir.target import Target
from ..plugin.interfaces import Backend
from ..runtime.program import Program
from ..store import Store, keys

AT_A_TIME = 4
log = logging.getLogger("agentcompile.installation")


def built(programs: Mapping[str, Program], known: Mapping[str, Kernel], ctx: Context) -> dict[str, Kernel]:
    """Kernels of every source of the programs for the target, by the backend that makes its code.

    Those among ``known`` (by digest of the source) that this backend made are taken as they are; the others come from
    the store or are built now.
    """
    backend = builder(ctx)
    if backend is None:
        return {}
    wanted = {s.digest: s for p in programs.values() for s in p.sources}
    kernels = {digest: kernel for digest, kernel in known.items()
               if digest in wanted and (kernel.backend, kernel.arch) == (backend.name, ctx.target.arch)}
    kernels |= build_all([source for digest, source in wanted.items() if digest not in kernels], backend, ctx)
    for source in {s.key: s for p in programs.values() for s in p.sources}.values():
        if source.digest in kernels:  # its bundle will load here without building anything
            ctx.store.put_known(kernels[source.digest].sha256, source)
    return kernels


def build_all(sources: Sequence[StepSource], backend: Backend, ctx: Context) -> dict[str, Kernel]:
    """Kernels by digest of their source, from the store, or built some at a time and stored; what does not build is a recorded failure."""
    keyed = {source.digest: keys.kernel_key(source, ctx.target, backend) for source in sources}
    kernels = {digest: kernel for digest, key in keyed.items() if (kernel := ctx.store.kernel(key)) is not None}
    missing = [source for source in sources if source.digest not in kernels]
    with ThreadPoolExecutor(min(AT_A_TIME, os.cpu_count() or 1), thread_name_prefix="build") as pool:
        building = [(source, pool.submit(backend.build, source, ctx.target)) for source in missing]
        for source, future in building:
            try:
                kernels[source.digest] = future.result()
            except BuildError as exc:
                ctx.fail(Failure(stage=StageName.LOWER, cause=Cause.COMPILE, plugin=backend.name,
                                 subject=_entries(source), message=str(exc)))
                continue
            except (Exception, SystemExit) as exc:  # a defect of the backend costs this kernel
                if ctx.catalog.strict:
                    raise
                ctx.fail(Failure(stage=StageName.LOWER, cause=Cause.EXCEPTION, plugin=backend.name, subject=_entries(source),
                                 message=bounded(f"build: {type(exc).__name__}: {exc}"), traceback=last_frames(exc)))
                continue
            ctx.store.put_kernel(keyed[source.digest], kernels[source.digest])
    return kernels


def _entries(source: StepSource) -> str:
    return "kernel " + ", ".join(launch.entry for launch in source.launches)


def build_one(source: StepSource, backend: Backend, ctx: Context) -> Kernel | None:
    """One kernel from the store, or built and stored; None and a recorded failure if it does not build."""
    return build_all([source], backend, ctx).get(source.digest)


def stored_or_built(store_of: "Callable[[], Store | None]", backend: Backend, source: StepSource, target: Target) -> Kernel:
    """A kernel that no program has, from the store as long as there is that, or built by ``backend`` and stored.

    Raises:
        BuildError: it does not build.
    """
    store, key = store_of(), keys.kernel_key(source, target, backend)
    kernel = store.kernel(key) if store is not None else None
    if kernel is None:
        kernel = backend.build(source, target)
        try:
            if store is not None:
                store.put_kernel(key, kernel)
        except Exception as exc:  # the kernel is there
            log.info("the kernel %s is not stored: %s", source.digest, exc)
    return kernel


def builder(ctx: Context) -> Backend | None:
    """The backend that builds for the target: its own where that can, else the one candidates are validated on."""
    own = ctx.catalog.backend_of(ctx.target)
    return own if own is not None and own.can_build(ctx.target) else ctx.backend
