"""The emitted package: what its files are, and what identifies where it may run."""

from attrs import field, frozen

from .candidate import Kernel, Resources
from .graph import ModelInfo, Workload
from .target import Target

MANIFEST = "manifest.json"
GRAPHS = "graphs.json"
PROGRAMS = "programs.json"
SELECTIONS = "selections.json"
RECORDS = "records.json"
KERNELS = "kernels"
INCLUDE = "include"
EXTENSION = "extension"


@frozen(kw_only=True)
class FileEntry:
    """One file: its path inside the bundle, with forward slashes, and its SHA-256."""

    path: str
    sha256: str


@frozen(kw_only=True)
class KernelEntry:
    """One built kernel in the bundle: the digest of its source and where its binary lies."""

    digest: str
    path: str
    backend: str
    arch: str
    sha256: str
    compiler: str
    resources: Resources


@frozen(kw_only=True)
class Manifest:
    """The first file that is read: schema, versions, model, workload, target and every other file with its hash."""

    schema: int
    core_version: str
    model: ModelInfo
    workload: Workload
    target: Target
    kernels: tuple[KernelEntry, ...]
    files: tuple[FileEntry, ...]
    provisional: bool = False  # validated without its hardware: never launched on it unmeasured
    eager_reason: str = ""
    source: str = ""  # where the model was when it was compiled: a folder or an identifier; empty for a live one


@frozen(kw_only=True)
class Bundle:
    """A bundle in memory: the manifest, and the content of every file by path."""

    manifest: Manifest
    files: tuple[tuple[str, bytes], ...] = field(repr=False)


def kernel_of(entry: KernelEntry, binary: bytes) -> Kernel:
    """The kernel that an entry describes."""
    return Kernel(digest=entry.digest, backend=entry.backend, arch=entry.arch, binary=binary, sha256=entry.sha256,
                  compiler=entry.compiler, resources=entry.resources)
