"""Building: kernels of the sources of programs, from the store or from the backend that makes code for the target."""

from collections.abc import Mapping

from ..context import Context
from ..errors import BuildError, Cause, Failure, StageName
from ..ir.candidate import Kernel, StepSource
from ..plugin.interfaces import Backend
from ..runtime.program import Program
from ..store import keys


def built(programs: Mapping[str, Program], known: Mapping[str, Kernel], ctx: Context) -> dict[str, Kernel]:
    """Kernels of every source of the programs for the target, by the backend that makes its code.

    Those among ``known`` (by digest of the source) that this backend made are taken as they are; the others come from
    the store or are built now.
    """
    backend = builder(ctx)
    if backend is None:
        return {}
    kernels: dict[str, Kernel] = {}
    for source in {s.digest: s for p in programs.values() for s in p.sources}.values():
        kernel = known.get(source.digest)
        if kernel is None or (kernel.backend, kernel.arch) != (backend.name, ctx.target.arch):
            kernel = build_one(source, backend, ctx)
        if kernel is not None:
            kernels[source.digest] = kernel
    for source in {s.key: s for p in programs.values() for s in p.sources}.values():
        if source.digest in kernels:  # its bundle will load here without building anything
            ctx.store.put_known(kernels[source.digest].sha256, source)
    return kernels


def build_one(source: StepSource, backend: Backend, ctx: Context) -> Kernel | None:
    """One kernel from the store, or built and stored; None and a recorded failure if it does not build."""
    key = keys.kernel_key(source, ctx.target, backend)
    kernel = ctx.store.kernel(key)
    if kernel is not None:
        return kernel
    try:
        kernel = backend.build(source, ctx.target)
    except BuildError as exc:
        ctx.fail(Failure(stage=StageName.LOWER, cause=Cause.COMPILE, plugin=backend.name,
                         subject="kernel " + ", ".join(launch.entry for launch in source.launches), message=str(exc)))
        return None
    ctx.store.put_kernel(key, kernel)
    return kernel


def builder(ctx: Context) -> Backend | None:
    """The backend that builds for the target: its own where that can, else the one candidates are validated on."""
    own = ctx.catalog.backend_of(ctx.target)
    return own if own is not None and own.can_build(ctx.target) else ctx.backend
