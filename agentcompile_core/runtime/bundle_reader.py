"""Reading a bundle: verify it, refuse what it does not fit, and give back its graphs, programs and kernels. Executes nothing of it."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from ..errors import AgentCompileError, UsageError, one_line
from ..ir import ranges, serial
from ..ir.bundle import GRAPHS, MANIFEST, PROGRAMS, RECORDS, SELECTIONS, Manifest, kernel_of
from ..ir.candidate import Kernel, StepSource
from ..ir.graph import GraphKind, GraphSet
from ..ir.record import TuningRecord
from ..ir.selection import Selection
from ..ir.target import Target
from ..version import __version__
from .program import Program, Segment, framework_program
from .program_facts import check_program

MAX_MANIFEST_BYTES = 64 << 20
REPLACED = 5  # times that a bundle may be replaced while it is read
MAX_BUNDLE_BYTES = 4 << 30  # of all its files: nothing there is as large as weights


@frozen(kw_only=True)
class Installed:
    """What a bundle holds, verified."""

    manifest: Manifest
    graphs: GraphSet
    programs: dict[str, Program]
    selections: tuple[Selection, ...]
    records: tuple[TuningRecord, ...]
    kernels: dict[str, Kernel]


def read(folder: Path) -> Installed:
    """Read and verify the bundle in ``folder``: files, then graphs, programs and kernels; nothing of it runs.

    One that is replaced by another bundle while it is read is read again, so that what comes back is one of them.

    Raises:
        UsageError: it is no bundle, is damaged, was written by another version, or its graphs call what no graph may.
    """
    for _ in range(REPLACED):
        manifest = read_manifest(folder)
        try:
            return _read(folder, manifest)
        except Exception as exc:  # whatever a tampered file leads to; all of it is its fault
            why, error = str(exc) if isinstance(exc, AgentCompileError) else f"{type(exc).__name__}: {exc}", exc
        if read_manifest(folder) == manifest:
            break
    if isinstance(error, UsageError) and str(folder) in why:
        raise error
    raise UsageError(f"the bundle {folder} is damaged or of another version ({one_line(why, 300)}); emit it again") from error


def _read(folder: Path, manifest: Manifest) -> Installed:
    from ..ops.graph_check import check_graphs  # torch, which reading a manifest does without

    data = _files(folder, manifest)
    with _of_file(GRAPHS):
        graphs = check_graphs(serial.loads(data[GRAPHS].decode(), GraphSet).verify())
    if (graphs.model, graphs.workload) != (manifest.model, manifest.workload):
        raise UsageError(f"{GRAPHS} of the bundle {folder} is of another model or workload than its {MANIFEST}; emit it again")
    with _of_file(SELECTIONS):
        selections = tuple(serial.structure(item, Selection) for item in serial.parse(data[SELECTIONS].decode()))
    with _of_file(PROGRAMS):
        programs = _programs(serial.parse(data[PROGRAMS].decode()), graphs, selections, manifest)
    with _of_file(RECORDS):
        records = tuple(serial.structure(item, TuningRecord) for item in serial.parse(data[RECORDS].decode()))
    kernels = {}
    for entry in manifest.kernels:
        if entry.path not in data or hashlib.sha256(data[entry.path]).hexdigest() != entry.sha256:
            raise UsageError(f"kernel {entry.path} of the bundle {folder} is damaged; emit the bundle again")
        kernels[entry.digest] = kernel_of(entry, data[entry.path])
    return Installed(manifest=manifest, graphs=graphs, programs=programs, selections=selections, records=records,
                     kernels=kernels)


@contextmanager
def _of_file(name: str) -> Iterator[None]:
    """What is said of a file's text names the file."""
    try:
        yield
    except AgentCompileError as exc:
        raise UsageError(f"{name}: {exc}") from exc


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone.

    Raises:
        UsageError: as ``read``.
    """
    if not (folder / MANIFEST).is_file():
        raise UsageError(f"{folder} is not a bundle: it has no {MANIFEST}; make one with `agentcompile compile MODEL --out {folder}`")
    try:
        raw = serial.parse(_content(folder, MANIFEST, MAX_MANIFEST_BYTES).decode())
        schema = raw.get("schema") if isinstance(raw, dict) else serial.SCHEMA
        if schema == serial.SCHEMA:
            manifest = serial.structure(raw, Manifest)
    except (UsageError, UnicodeDecodeError) as exc:
        raise UsageError(f"{MANIFEST} of the bundle {folder} is damaged ({exc}); emit it again") from exc
    if schema != serial.SCHEMA:
        raise UsageError(f"bundle {folder} has schema {schema}, this version {__version__} reads schema {serial.SCHEMA}; "
                         "emit it again with this version")
    if manifest.core_version.split(".")[:2] != __version__.split(".")[:2]:
        raise UsageError(f"bundle {folder} was made by version {manifest.core_version}, this is {__version__}; "
                         "emit it again with this version")
    return manifest


def _files(folder: Path, manifest: Manifest) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    left = MAX_BUNDLE_BYTES
    for entry in manifest.files:
        found[entry.path] = data = _content(folder, entry.path, left)
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise UsageError(f"{entry.path} of the bundle {folder} was changed after it was emitted; emit it again")
        left -= len(data)
    lacking = [name for name in (GRAPHS, PROGRAMS, SELECTIONS, RECORDS) if name not in found]
    if lacking:
        raise UsageError(f"the {MANIFEST} of the bundle {folder} does not list {lacking[0]}; emit it again")
    return found


def _content(folder: Path, path: str, most: int) -> bytes:
    """The bytes of one file of the bundle, which must lie inside of it and hold no more than ``most``."""
    try:
        target = (folder / path).resolve()
        inside = target.is_relative_to(folder.resolve())
    except (ValueError, OSError, RuntimeError):  # a zero byte in it, a name too long, links in a circle
        inside = False
    if not inside:
        raise UsageError(f"bundle {folder} names {path!r}, which lies outside of it; do not use it")
    try:
        if not target.is_file():
            raise UsageError(f"bundle {folder} lacks {path}; copy it whole or emit it again")
        with target.open("rb") as file:
            data = file.read(most + 1)
    except OSError as exc:
        raise UsageError(f"{path} of the bundle {folder} cannot be read ({exc.strerror}); mend its permissions") from exc
    if len(data) > most:
        raise UsageError(f"{path} of the bundle {folder} is larger than the {most} bytes that are read; emit it again")
    return data


@frozen(kw_only=True)
class _StoredProgram:
    graph: str
    segments: tuple[Segment, ...]
    sources: tuple[StepSource, ...]
    start: int = 0


def _programs(items: Any, graphs: GraphSet, selections: tuple[Selection, ...], manifest: Manifest) -> dict[str, Program]:
    """By name: one for each graph, of the decode step one for each range of positions in which something else is selected."""
    found = [check_program(_program(item, graphs), manifest.target) for item in items]
    names = {program.name for program in found}
    lacking = [graph.name for graph in graphs.graphs if graph.name not in names]
    if lacking:
        raise UsageError(f"the bundle has no program for its graph {lacking[0]!r}; emit it again")
    if len(names) < len(found):
        raise UsageError(f"the bundle has {len(found)} programs of {len(names)} names; emit it again")
    starts = {program.start for program in found} | {0}
    if starts != set(ranges.starts_of(selections)):
        raise UsageError(f"the bundle has programs from the positions {sorted(starts)} on, and selections from "
                         f"{list(ranges.starts_of(selections))} on; emit it again")
    return {program.name: program for program in found}


def _program(item: Any, graphs: GraphSet) -> Program:
    stored = serial.structure(item, _StoredProgram)
    graph = next((g for g in graphs.graphs if g.name == stored.graph), None)
    if graph is None:
        raise UsageError(f"the bundle has a program for {stored.graph!r} but no such graph; emit it again")
    ranged = graph.kind is GraphKind.DECODE and graphs.kv is not None and stored.start in ranges.beginnings(0, graphs.kv.capacity)
    if stored.start and not ranged:
        raise UsageError(f"the bundle has a program for {stored.graph!r} from position {stored.start} on, which it cannot have; "
                         "emit it again")
    return Program(graph=graph, segments=stored.segments, sources=stored.sources, start=stored.start)


def check_model(installed: Installed, digest: str, name: str, unstable: str) -> None:
    """Refuse a bundle that was made for another model, or for one that nobody can tell from others (``unstable``: why).

    Raises:
        UsageError: the digests over all that graphs depend on (code, attributes, configuration, parameter specs) differ, or do not hold
            all of it.
    """
    made_for = installed.manifest.model
    if unstable:
        raise UsageError(f"nobody can tell whether {name} is the model that the bundle was compiled for ({unstable}); compile this one")
    if made_for.digest != digest:
        raise UsageError(f"the bundle was compiled for {made_for.name} ({made_for.model_type}, digest {made_for.digest}), "
                         f"the model given is {name} (digest {digest}): its code, attributes, configuration or parameters differ; "
                         "pass the model it was compiled for, or compile this one")


def check_graphs(folder: str | Path, difference: str, name: str) -> None:
    """Refuse a bundle whose graphs compute something else than the model given (``difference``: how; empty where they do not).

    Raises:
        UsageError: there is a difference.
    """
    if difference:
        raise UsageError(f"the graphs of the bundle {folder} compute something else than {name}: {difference}; compile {name} again")


def check_captured(folder: str | Path, unlike: str, eager_reason: str, name: str) -> None:
    """Refuse a bundle whose graphs are not those that are captured here (``unlike``: how; ``eager_reason``: why there are none).

    Raises:
        UsageError: they are not.
    """
    if unlike:
        raise UsageError(f"the graphs of the bundle {folder} are not what is captured of {name} here: {eager_reason or unlike}; compile "
                         f"{name} again, or trust who made them (--trust-graphs: they are compared with it on a few tokens alone)")


def runnable(installed: Installed, live: Target | None) -> str:
    """Why the bundle's kernels cannot run on this machine's device (empty: they can).

    Raises:
        UsageError: the hardware here is of another architecture than the bundle's.
    """
    made_for = installed.manifest.target
    if live is None:
        return f"no {made_for.name} here: every step runs on the framework's operators"
    if live.arch != made_for.arch:
        raise UsageError(f"the bundle was built for {made_for.arch} ({made_for.name}), the hardware here is {live.arch} ({live.name}); "
                         "compile for this one")
    if installed.manifest.provisional:
        return "the bundle's kernels were validated without their hardware and never measured: every step runs on the framework's operators"
    return ""


def on_framework(installed: Installed) -> dict[str, Program]:
    """The same graphs with every node on the framework."""
    return {program.graph.name: framework_program(program.graph) for program in installed.programs.values()}
