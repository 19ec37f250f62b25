"""Where CUDA's own headers and compilers are."""

import functools
import os
import re
import shutil
from pathlib import Path


@functools.cache
def cuda_includes() -> tuple[Path, ...]:
    """Folders with ``cuda_fp16.h``: of NVIDIA's wheels, then of toolkits; empty where there is neither.

    The first one is used; the others fill in what it lacks (the wheel of the runtime alone has no libcu++).
    """
    found = (_of_wheels(), *(home / "include" for home in toolkit_homes()))
    return tuple(dict.fromkeys(path.resolve() for path in found if path is not None and (path / "cuda_fp16.h").is_file()))


def cuda_include_options() -> list[str]:
    """Options that make the CUDA headers, and the libcu++ beside them, visible."""
    folders = [folder for path in cuda_includes() for folder in (path, path / "cccl") if folder.is_dir()]
    return [f"-I{folder}" for folder in folders]


@functools.cache
def headers_version(include: Path) -> str:
    """The CUDA version of an include folder, as ``13.0``; "unknown" where it does not say."""
    for name, macro in (("cuda.h", "CUDA_VERSION"), ("cuda_runtime_api.h", "CUDART_VERSION")):
        try:
            text = (include / name).read_text(errors="replace")
        except OSError:
            continue
        found = re.search(rf"#define\s+{macro}\s+(\d+)", text)
        if found:
            number = int(found[1])
            return f"{number // 1000}.{number % 1000 // 10}"
    return "unknown"


def toolkit_homes() -> list[Path]:
    """Folders where a CUDA toolkit may be installed, the user's choice first."""
    named = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", "")]
    on_path = shutil.which("nvcc")
    found = [Path(name) for name in named if name] + [Path("/usr/local/cuda")]
    if on_path:
        found.append(Path(on_path).resolve().parent.parent)
    return found


def nvcc() -> Path | None:
    """The nvcc of the first toolkit that has one."""
    for home in toolkit_homes():
        if (home / "bin" / "nvcc").is_file():
            return home / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    return Path(on_path) if on_path else None


def _of_wheels() -> Path | None:
    try:
        from cuda import pathfinder

        found = pathfinder.find_nvidia_header_directory("cudart")
    except (ImportError, AttributeError, RuntimeError):
        return None
    return Path(found) if found else None
