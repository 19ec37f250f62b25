"""Finds what the emulator builds with: a C++ compiler and the CUDA headers."""

import functools
import os
import platform
import shutil
import subprocess
from pathlib import Path

from attrs import frozen

from agentcompile_core.plugin_api import UsageError


@frozen(kw_only=True)
class Toolchain:
    """A g++ with its version line, the folders of the CUDA headers, and the flags for this processor."""

    compiler: str
    version: str
    includes: tuple[Path, ...]
    processor_flags: tuple[str, ...]


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


def _processor_flags() -> tuple[str, ...]:
    """``-mfma`` where the processor has it: fmaf is exact either way, but a library call without it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    return ("-mfma",) if platform.machine() == "x86_64" and " fma " in text else ()


@functools.cache
def find_toolchain() -> Toolchain:
    """Return the toolchain of this machine.

    Raises:
        UsageError: there is no g++, or no CUDA headers, or this is not Linux.
    """
    if platform.system() != "Linux":
        raise UsageError(f"the emulator runs on Linux, this is {platform.system()}; use a Linux machine or container")
    compiler = shutil.which(os.environ.get("AGENTCOMPILE_EMULATION_CXX", "g++"))
    if compiler is None:
        raise UsageError("the emulator needs g++ (12 or newer recommended), which is not on PATH; install the package g++")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    return Toolchain(compiler=compiler, version=(version.splitlines() or ["unknown"])[0], includes=_cuda_includes(),
                     processor_flags=_processor_flags())
