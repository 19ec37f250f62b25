"""The files that a backend lets every source include."""

import functools
import hashlib
from pathlib import Path


def included_files(folders: tuple[Path, ...]) -> dict[str, bytes]:
    """Content of every file below ``folders`` by path as sources include it; the first folder that has a path wins, as in a compiler."""
    found: dict[str, bytes] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                found.setdefault(path.relative_to(folder).as_posix(), path.read_bytes())
    return dict(sorted(found.items()))


@functools.cache
def folders_digest(folders: tuple[Path, ...]) -> str:
    """SHA-256 over paths and content of ``included_files``, read once per process; empty without files."""
    digest = hashlib.sha256()
    files = included_files(folders)
    for path, data in files.items():
        digest.update(f"{path}\0{len(data)}\0".encode() + data)
    return digest.hexdigest() if files else ""
