"""Where the device library is, and what it is: ``#include <agentcompile/...>`` in every CUDA source."""

import functools
import hashlib
from pathlib import Path


def include_dir() -> Path:
    """The folder that ``<agentcompile/...>`` is relative to."""
    return Path(__file__).parent / "include"


@functools.cache
def digest() -> str:
    """SHA-256 over names and bytes of every header of the device library, as hex."""
    found = hashlib.sha256()
    for path in sorted(include_dir().rglob("*.cuh")):
        data = path.read_bytes()
        found.update(f"{path.relative_to(include_dir()).as_posix()}\0{len(data)}\0".encode() + data)
    return found.hexdigest()
