"""Stage emit: selections, programs and kernels as a bundle, and the bundle as a folder that appears whole or not at all."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from ...context import Context
from ...errors import UsageError
from ...extension import extension_files
from ...ir import serial
from ...ir.bundle import EXTENSION, GRAPHS, KERNELS, MANIFEST, PROGRAMS, RECORDS, SELECTIONS, Bundle, FileEntry, KernelEntry, Manifest
from ...ir.candidate import Kernel, StepSource
from ...ir.graph import GraphSet
from ...ir.record import TuningRecord
from ...ir.selection import Basis, Selection
from ...runtime.program import Program
from ...version import __version__


def run(graphs: GraphSet, programs: Mapping[str, Program], selections: tuple[Selection, ...], kernels: Mapping[str, Kernel],
        records: tuple[TuningRecord, ...], ctx: Context) -> Bundle:
    """Everything that a machine needs to run the program without tuning, as files in memory."""
    files: dict[str, bytes] = {
        GRAPHS: serial.dumps(graphs).encode(),
        PROGRAMS: serial.dumps([_without_graph(p) for _, p in sorted(programs.items())]).encode(),
        SELECTIONS: serial.dumps(list(selections), indent=1).encode(),
        RECORDS: serial.dumps(list(records)).encode(),
    }
    sources = {s.digest: s for p in programs.values() for s in p.sources}
    entries = []
    for digest in sorted(sources):
        files.update(_source_files(sources[digest]))
        if digest in kernels:
            kernel = kernels[digest]
            path = f"{KERNELS}/{digest}/kernel.cubin" if kernel.backend == "cuda" else f"{KERNELS}/{digest}/kernel.bin"
            files[path] = kernel.binary
            entries.append(KernelEntry(digest=digest, path=path, backend=kernel.backend, arch=kernel.arch, sha256=kernel.sha256,
                                       compiler=kernel.compiler, resources=kernel.resources))
    files.update(_headers())
    files.update({f"{EXTENSION}/{name}": data for name, data in extension_files(programs, kernels, ctx.target).items()})
    manifest = Manifest(
        schema=serial.SCHEMA, core_version=__version__, model=graphs.model, workload=graphs.workload, target=ctx.target,
        kernels=tuple(entries), files=tuple(FileEntry(path=p, sha256=hashlib.sha256(d).hexdigest()) for p, d in sorted(files.items())),
        provisional=any(s.basis is Basis.PROVISIONAL for s in selections), eager_reason=graphs.eager_reason)
    return Bundle(manifest=manifest, files=tuple(sorted(files.items())))


def _without_graph(program: Program) -> dict:  # type: ignore[type-arg]
    data = serial.unstructure(program)
    data["graph"] = program.graph.name
    return data


def _source_files(source: StepSource) -> dict[str, bytes]:
    folder = f"{KERNELS}/{source.digest}"
    found = {f"{folder}/kernel.cu": source.code.encode()}
    found.update({f"{folder}/{name}": text.encode() for name, text in source.headers})
    return found


def _headers() -> dict[str, bytes]:
    folder = resources.files("agentcompile_core") / "include" / "agentcompile"
    found = sorted((f for f in folder.iterdir() if f.name.endswith(".cuh")), key=lambda f: f.name)
    return {f"include/agentcompile/{f.name}": f.read_bytes() for f in found}


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
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as exc:
        raise UsageError(f"cannot write the bundle to {folder}: {exc.strerror or exc}") from exc
    try:
        for path, data in bundle.files:
            target = temporary / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        (temporary / MANIFEST).write_text(serial.dumps(bundle.manifest, indent=1))
        temporary.chmod(0o755)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
            os.replace(folder, old / "bundle")
            os.replace(temporary, folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(temporary, folder)
    except OSError as exc:
        raise UsageError(f"cannot write the bundle to {folder}: {exc.strerror or exc}") from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
