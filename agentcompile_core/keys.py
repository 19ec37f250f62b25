"""Cache keys: canonical digests of every input of what is stored under them."""

from functools import cache
from importlib import resources

from . import serial
from .candidate import StepSource
from .graph import Workload
from .target import Target
from .version import __version__


@cache
def device_library_digest() -> str:
    """Digest of the text of every header of the device library; part of every kernel's key."""
    folder = resources.files("agentcompile_core") / "include" / "agentcompile"
    return serial.digest([(f.name, f.read_text()) for f in sorted(folder.iterdir(), key=lambda f: f.name) if f.name.endswith(".cuh")])


def kernel_key(source: StepSource, target: Target, backend: str, compiler: str) -> str:
    """Key of a built kernel: its text, the device library, the architecture and the compiler."""
    return "kernel-" + serial.digest(source, device_library_digest(), target.arch, backend, compiler, length=32)


def capture_key(identity: str, workload: Workload, versions: tuple[str, ...]) -> str:
    """Key of captured graphs: all that they depend on (capture.identity), the workload, versions of torch, transformers, Python, us."""
    return "capture-" + serial.digest(identity, workload, versions, __version__, length=32)
