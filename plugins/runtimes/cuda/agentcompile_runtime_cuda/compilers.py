"""The two compilers of CUDA C++: NVRTC in a server process (0.05 s a source), and nvcc as a guarded command."""

import base64
import functools
import json
import os
import queue
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

from agentcompile_cuda_kit import include_dir

from agentcompile_core.plugin_api import BuildError, GuardedServer, PrivateFolder, Reject, StepSource, run_guarded

from . import headers
from .ptxas import first_error

FLAGS = ("--std=c++17", "--ptxas-options=-v")
SERVERS = 16


class Compiler(Protocol):
    """Turns a StepSource into a cubin."""

    def version(self) -> str:
        """Name and version."""

    def capabilities(self) -> tuple[int, ...]:
        """Compute capabilities it can build for, as 90 for sm_90."""

    def compile(self, source: StepSource, arch: str, deadline_s: float) -> tuple[bytes, str]:
        """The cubin and the log of ``ptxas -v``. Raises BuildError with the first error line and the log as a note."""


class Nvrtc:
    """NVRTC through cuda-bindings, in up to sixteen server processes of this process, so that an endless build costs only itself."""

    def __init__(self) -> None:
        search = os.pathsep.join(entry for entry in sys.path if entry)
        self._idle = _servers(os.getpid(), search, tuple(sorted(toolkit_environment().items())))

    def version(self) -> str:
        """For example ``nvrtc 13.0``."""
        return "nvrtc {}.{}".format(*_nvrtc_facts()[0])

    def capabilities(self) -> tuple[int, ...]:
        """What this NVRTC supports."""
        return _nvrtc_facts()[1]

    def compile(self, source: StepSource, arch: str, deadline_s: float) -> tuple[bytes, str]:
        """Compile ``source`` for ``arch``; the headers of the source are passed in memory."""
        request = {
            "name": f"{source.digest}.cu", "code": source.code, "headers": [list(pair) for pair in source.headers],
            "options": [f"--gpu-architecture={arch}", "-default-device", *FLAGS, f"-I{include_dir()}",
                        *headers.cuda_include_options()],
        }
        server = self._idle.get()
        try:
            reply: dict[str, Any] = json.loads(server.request(json.dumps(request).encode(), deadline_s))
        finally:
            self._idle.put(server)
        if reply["cubin"] is None:
            raise _build_error(reply["log"])
        return base64.b64decode(reply["cubin"]), reply["log"]


class Nvcc:
    """The nvcc of an installed toolkit, about 0.5 s a source."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def version(self) -> str:
        """For example ``nvcc 13.0``."""
        return f"nvcc {_nvcc_facts(self._path)[0]}"

    def capabilities(self) -> tuple[int, ...]:
        """What this nvcc supports."""
        return _nvcc_facts(self._path)[1]

    def compile(self, source: StepSource, arch: str, deadline_s: float) -> tuple[bytes, str]:
        """Compile ``source`` for ``arch`` in a private folder."""
        with PrivateFolder() as root:
            for name, text in (*source.headers, ("step.cu", source.code)):
                path = root / _inside(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            command = [str(self._path), "-cubin", f"-arch={arch}", *FLAGS, f"-I{include_dir()}", f"-I{root}",
                       "-o", str(root / "step.cubin"), str(root / "step.cu")]
            done = run_guarded(command, deadline_s=deadline_s, extra_env=toolkit_environment())
            log = (done.stdout + done.stderr).replace(f"{root}/", "")
            if done.returncode != 0:
                raise _build_error(log)
            return (root / "step.cubin").read_bytes(), log


def toolkit_environment() -> dict[str, str]:
    """Where the user says that a CUDA toolkit is, for a child process."""
    return {name: os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ}


def choose(preferred: str = "") -> Compiler | Reject:
    """NVRTC where it works, else nvcc, or the one that ``preferred`` names."""
    reasons = []
    if preferred in ("", "nvrtc"):
        usable = nvrtc_usable()
        if not isinstance(usable, Reject):
            return Nvrtc()
        reasons.append(usable.reason)
    if preferred in ("", "nvcc"):
        path = headers.nvcc()
        if path is not None and _nvcc_facts(path)[1]:
            return Nvcc(path)
        reasons.append("no working nvcc in CUDA_HOME, on PATH or in /usr/local/cuda")
    return Reject("; ".join(reasons) or f"unknown CUDA compiler {preferred!r}; allowed: nvrtc, nvcc")


@functools.cache
def nvrtc_usable() -> Literal[True] | Reject:
    """True, or why NVRTC cannot be used here."""
    try:
        _nvrtc_facts()
    except ImportError as exc:
        return Reject(f"NVRTC is not installed ({exc}); pip install cuda-bindings nvidia-cuda-nvrtc")
    except Exception as exc:  # the bindings raise their own types where the library cannot be loaded
        return Reject(f"NVRTC cannot be loaded ({type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else exc})")
    if not headers.cuda_includes():
        return Reject("the CUDA headers are missing; pip install nvidia-cuda-runtime or set CUDA_HOME to a toolkit")
    return True


@functools.cache
def _nvrtc_facts() -> tuple[tuple[int, int], tuple[int, ...]]:
    from cuda.bindings import nvrtc

    from .nvrtc_server import check

    major, minor = check(nvrtc.nvrtcVersion())
    return (int(major), int(minor)), tuple(int(arch) for arch in check(nvrtc.nvrtcGetSupportedArchs()))


@functools.cache
def _nvcc_facts(path: Path) -> tuple[str, tuple[int, ...]]:
    try:
        version = run_guarded([str(path), "--version"], deadline_s=20, extra_env=toolkit_environment())
        archs = run_guarded([str(path), "--list-gpu-code"], deadline_s=20, extra_env=toolkit_environment())
    except BuildError:
        return "unknown", ()
    found = re.search(r"release (\d+\.\d+)", version.stdout)
    return found[1] if found else "unknown", tuple(sorted({int(n) for n in re.findall(r"sm_(\d+)\b", archs.stdout)}))


@functools.cache
def _servers(process: int, search: str, toolkit: tuple[tuple[str, str], ...]) -> "queue.LifoQueue[GuardedServer]":
    """The idle servers of this process, for every catalog that it loads: those that run are taken first, the others start when needed."""
    command = [sys.executable, "-m", "agentcompile_runtime_cuda.nvrtc_server"]
    idle: queue.LifoQueue[GuardedServer] = queue.LifoQueue()
    for _ in range(min(SERVERS, os.cpu_count() or 1)):
        idle.put(GuardedServer(command, name="nvrtc", extra_env={**dict(toolkit), "PYTHONPATH": search}))
    return idle


def _build_error(log: str) -> BuildError:
    error = BuildError(first_error(log))
    error.add_note(log[:20_000])
    return error


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise BuildError(f"header {name!r} is not a relative name; give headers names such as plan.cuh")
    return path
