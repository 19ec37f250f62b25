"""Finds what the emulator builds with: a C++ compiler and the CUDA headers."""

import functools
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

from agentcompile_core.plugin_api import UsageError

GXX = "g++"
SETTING = "compiler of [plugin.emulation]"


@frozen(kw_only=True)
class Toolchain:
    """A g++ with its version line, the folders of the CUDA headers, and flags: those for this processor, those for a faster linker, and
    those that fill what a kernel reads before it sets it."""

    compiler: str
    version: str
    includes: tuple[Path, ...]
    processor_flags: tuple[str, ...]
    linker_flags: tuple[str, ...]
    poison_flags: tuple[str, ...]

    @functools.cached_property
    def headers(self) -> str:
        """SHA-256 of what is in the CUDA headers, for keys: read where one is made, and once, since it takes up to 200 ms."""
        return _digest_of(self.includes)


def _header_candidates() -> list[Path]:
    """Folders that may hold ``cuda_fp16.h``, best first: installed wheels, then CUDA toolkits."""
    found: list[Path] = []
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        folder = find_nvidia_header_directory("cudart")
        if folder:
            found.append(Path(folder))
    except Exception:  # not installed, or too old for this call: toolkits remain
        pass
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            found.append(Path(os.environ[variable]) / "include")
    nvcc = shutil.which("nvcc")
    if nvcc:
        found.append(Path(nvcc).resolve().parent.parent / "include")
    return [*found, Path("/usr/local/cuda/include")]


def _cuda_includes() -> tuple[Path, ...]:
    for folder in _header_candidates():
        # cuda_fp16.h needs <nv/target>, which is in the folder itself (toolkits before 13) or in its cccl folder.
        needed = ("cuda_fp16.h", "cuda_bf16.h", "builtin_types.h", "crt/host_defines.h")
        if all((folder / name).is_file() for name in needed):
            for target in (folder, folder / "cccl"):
                if (target / "nv" / "target").is_file():
                    return tuple(dict.fromkeys((folder, target)))
    raise UsageError(
        "the emulator found no CUDA headers (cuda_fp16.h and <nv/target>); install the wheels nvidia-cuda-runtime, "
        "nvidia-cuda-crt and nvidia-cuda-cccl with cuda-pathfinder, or set CUDA_HOME to a CUDA toolkit")


# Of a toolkit; its folder may be one that all headers of a system lie in.
_HEADER_FOLDERS = ("crt", "nv", "cuda", "cooperative_groups", "cub", "thrust")


def _digest_of(includes: tuple[Path, ...]) -> str:
    """SHA-256 of the CUDA headers, wherever they lie: what one environment built is of use to the next one with the same headers."""
    digest = hashlib.sha256()
    for folder in includes:
        beside = (name for pattern in ("*.h", "*.hpp") for name in folder.glob(pattern))
        below = (path for one in _HEADER_FOLDERS for path in _files_below(folder / one))
        for path in sorted(name for name in (*beside, *below) if name.is_file()):
            contents = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(contents)}\0".encode() + contents)
    return digest.hexdigest()


def _files_below(folder: Path) -> Iterator[Path]:
    """Names in a folder and in those below it, behind links too: of a circle of links, each real folder once."""
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        folders.sort()  # which of two ways to a folder is gone does not depend on the file system
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (Path(place) / name for name in names)


def _processor_flags() -> tuple[str, ...]:
    """``-mfma`` and ``-mf16c`` where the processor has them: results are the same bits, but without a library call or a loop each."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    if platform.machine() != "x86_64":
        return ()
    return tuple(flag for word, flag in (("fma", "-mfma"), ("f16c", "-mf16c")) if f" {word} " in text)


def _linker_flags() -> tuple[str, ...]:
    """gold, where it is installed, links a kernel in a third of the time: it does not read all of what libstdc++ exports."""
    return ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()


# Every byte of a local variable is 0xfe until it is set: NaN in half precision, -1.7e38 in the other two, an index far outside.
_POISON = "-ftrivial-auto-var-init=pattern"


def _poison_flags(compiler: str) -> tuple[str, ...]:
    """The flag, where this g++ knows it: from version 12 on. Else registers that nobody set hold what the stack held, often zeros."""
    try:
        done = subprocess.run([compiler, _POISON, "-fsyntax-only", "-x", "c++", os.devnull], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return (_POISON,) if done.returncode == 0 else ()


COMPILER: dict[str, Any] = {"doc": "the g++ that builds kernels for the CPU: a name on PATH or a path",
                            "user_only": True, "variable": "AGENTCOMPILE_EMULATION_CXX"}


@functools.cache
def find_toolchain(compiler: str = GXX) -> Toolchain:
    """Return the toolchain of this machine around ``compiler``, a name on PATH or a path (the setting of that name).

    Raises:
        UsageError: there is no such g++, or no CUDA headers, or this is not Linux.
    """
    if platform.system() != "Linux":
        raise UsageError(f"the emulator runs on Linux, this is {platform.system()}; use a Linux machine or container")
    path = shutil.which(compiler)
    if path is None and compiler == GXX:
        raise UsageError("the emulator needs g++ (12 or newer recommended), which is not on PATH; install the package g++")
    if path is None:
        raise UsageError(f"{SETTING} is {compiler!r}, which is no program; name a g++ on PATH or by its path")
    includes = _cuda_includes()
    return Toolchain(compiler=path, version=_version(path), includes=includes,
                     processor_flags=_processor_flags(), linker_flags=_linker_flags(), poison_flags=_poison_flags(path))


def _version(path: str) -> str:
    """The first line of what ``--version`` says; its flags and its sanitizers are GCC's, so another compiler is refused."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise UsageError(f"{SETTING} is {path!r}, which does not run ({type(exc).__name__}); name a g++") from exc
    first = (said.splitlines() or ["nothing"])[0]
    if "Free Software Foundation" not in said:
        raise UsageError(f"{SETTING} is {path!r}, which is no g++ (it calls itself {first!r}); name a g++")
    return first
