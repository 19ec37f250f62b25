"""Stage emit: selections, programs and kernels as a bundle, and the bundle as a folder that appears whole or not at all."""

import ctypes
import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from attrs import evolve

from ...context import Context
from ...errors import Cause, ContractError, StageName, UsageError
from ...ir import serial
from ...ir.bundle import (
    EXTENSION,
    GRAPHS,
    INCLUDE,
    KERNELS,
    MANIFEST,
    PROGRAMS,
    RECORDS,
    SELECTIONS,
    Bundle,
    FileEntry,
    KernelEntry,
    Manifest,
)
from ...ir.candidate import Kernel, StepSource
from ...ir.graph import GraphSet
from ...ir.record import TuningRecord
from ...ir.selection import Basis, Selection
from ...plugin.include_folders import included_files
from ...plugin.interfaces import Backend
from ...private_folders import PrivateFolder, sweep
from ...runtime.program import Program
from ...version import __version__

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux' renameat2


def run(graphs: GraphSet, programs: Mapping[str, Program], selections: tuple[Selection, ...], kernels: Mapping[str, Kernel],
        records: tuple[TuningRecord, ...], ctx: Context) -> Bundle:
    """Everything that a machine needs to run the program without tuning, as files in memory."""
    return prepared(graphs, programs, selections, kernels, records, ctx)()


def prepared(graphs: GraphSet, programs: Mapping[str, Program], selections: tuple[Selection, ...], kernels: Mapping[str, Kernel],
             records: tuple[TuningRecord, ...], ctx: Context) -> Callable[[], Bundle]:
    """What ``run`` returns, from what there is now: plugins have been asked, and values are written when the bundle is made."""
    files: dict[str, bytes] = {}
    sources = {s.digest: s for p in programs.values() for s in p.sources}
    makers = {digest: _maker(source, kernels.get(digest), ctx) for digest, source in sources.items()}
    entries = []
    for digest in sorted(sources):
        maker = makers[digest]
        files.update(_source_files(sources[digest], maker))
        if digest in kernels:
            kernel = kernels[digest]
            path = f"{KERNELS}/{digest}/kernel{maker.binary_suffix if maker else Backend.binary_suffix}"
            files[path] = kernel.binary
            entries.append(KernelEntry(digest=digest, path=path, backend=kernel.backend, arch=kernel.arch, sha256=kernel.sha256,
                                       compiler=kernel.compiler, resources=kernel.resources))
    for backend in sorted({maker.name: maker for maker in makers.values() if maker is not None}.values(), key=lambda b: b.name):
        files.update(_backend_files(backend, programs, kernels, ctx))
    manifest = Manifest(
        schema=serial.SCHEMA, core_version=__version__, model=graphs.model, workload=graphs.workload, target=ctx.target,
        kernels=tuple(entries), files=(), provisional=any(s.basis is Basis.PROVISIONAL for s in selections),
        eager_reason=graphs.eager_reason)
    values, listed = {GRAPHS: graphs, SELECTIONS: list(selections), RECORDS: list(records)}, [p for _, p in sorted(programs.items())]

    def made() -> Bundle:
        written = {name: serial.dumps(value, indent=1 if name == SELECTIONS else None).encode() for name, value in values.items()}
        written[PROGRAMS] = serial.dumps([_without_graph(p) for p in listed]).encode()
        found = sorted({**files, **written}.items())
        entries = tuple(FileEntry(path=path, sha256=hashlib.sha256(data).hexdigest()) for path, data in found)
        return Bundle(manifest=evolve(manifest, files=entries), files=tuple(found))

    return made


def _without_graph(program: Program) -> dict:  # type: ignore[type-arg]
    data = serial.unstructure(evolve(program, graph=evolve(program.graph, values=(), nodes=(), inputs=(), outputs=())))
    data["graph"] = program.graph.name
    return data


def _maker(source: StepSource, kernel: Kernel | None, ctx: Context) -> Backend | None:
    """The backend that built the source, or could have: it knows the files of that language."""
    backends = ctx.catalog.backends.values()
    if kernel is not None:
        return next((b for b in backends if b.name == kernel.backend), None)
    return next((b for b in backends if source.language in b.languages), None)


def _source_files(source: StepSource, maker: Backend | None) -> dict[str, bytes]:
    folder = f"{KERNELS}/{source.digest}"
    suffix = maker.suffix(source.language) if maker else f".{source.language}"
    found = {f"{folder}/kernel{suffix}": source.code.encode()}
    found.update({f"{folder}/{name}": text.encode() for name, text in source.headers})
    return found


def _backend_files(backend: Backend, programs: Mapping[str, Program], kernels: Mapping[str, Kernel], ctx: Context) -> dict[str, bytes]:
    def ask() -> dict[str, bytes]:
        part = backend.emit(programs, kernels, ctx.target)
        for path in part:
            parts = PurePosixPath(path).parts
            if not parts or ".." in parts or PurePosixPath(path).is_absolute():
                raise ContractError(f"emit() of backend {backend.name} names the file {path!r}; give paths below the folder {EXTENSION}")
        included = included_files(backend.include_dirs())
        return {f"{INCLUDE}/{p}": data for p, data in included.items()} | {f"{EXTENSION}/{p}": data for p, data in part.items()}

    return ctx.catalog.guard(ask, stage=StageName.EMIT, cause=Cause.CONTRACT, plugin=backend.name, subject="its part of a bundle") or {}


def check_folder(folder: Path) -> None:
    """Check that a bundle may be written as ``folder``: it does not exist, is empty, or is an older bundle.

    Raises:
        UsageError: it is something else, or nothing may be written there.
    """
    parent = next((p for p in folder.absolute().parents if p.exists()), Path("/"))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        why = "may not be written to" if parent.is_dir() else "is a file"
        raise UsageError(f"cannot write the bundle to {folder}: {parent} {why}; name another folder")
    if folder.exists() and (not folder.is_dir() or (not (folder / MANIFEST).is_file() and any(folder.iterdir()))):
        raise UsageError(f"{folder} exists and is not a bundle; name a new folder, or an older bundle to replace")


def write(bundle: Bundle, folder: Path) -> None:
    """Write a bundle as ``folder``, which must not exist or be an older bundle; nothing half-written stays.

    Raises:
        UsageError: the folder holds something else, or cannot be written.
    """
    check_folder(folder)
    folder = folder.absolute()
    prefix = f".{folder.name}-private-"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        sweep(folder.parent, prefix)  # of saves that were killed
        with PrivateFolder(folder.parent, prefix) as private:
            made = private / "bundle"
            for path, data in (*bundle.files, (MANIFEST, serial.dumps(bundle.manifest, indent=1).encode())):
                target = made / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
            made.chmod(0o755)
            _place(made, folder)
    except OSError as exc:
        raise UsageError(f"cannot write the bundle to {folder}: {exc.strerror or exc}") from exc


def _place(made: Path, folder: Path) -> None:
    """Put ``made`` where ``folder`` is, which is then in its place; killed at any moment, one of them is there."""
    if not folder.exists():
        os.replace(made, folder)
    elif not _exchanged(made, folder):
        os.replace(folder, made.with_name("old"))
        os.replace(made, folder)


def _exchanged(one: Path, other: Path) -> bool:
    """Whether the two folders changed places in one step, as Linux can do on most file systems."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    return rename is not None and rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0
