"""Digests of code that evidence depends on: what a changed oracle, validator or protocol of timing found out before does not count."""

import functools
import hashlib
import sys
from pathlib import Path

CORE = Path(__file__).parents[1]
JUDGES = ("ops", "worker", "ir/verdict.py", "ir/source_check.py", "ir/ranges.py", "stages/validate/input_cases.py", "plugin/match_kind.py",
          "plugin/controls.py")
CAPTURERS = ("ops", "stages/capture", "ir/graph.py", "runtime/installed_packages.py")
_COMPILED = (".pyc", ".pyo", ".so")


@functools.cache
def judging_code() -> str:
    """Digest of the core's own code that makes inputs and references, compares, and times."""
    return digest_of(*(CORE / name for name in JUDGES))


@functools.cache
def capturing_code() -> str:
    """Digest of the core's own code that makes graphs."""
    return digest_of(*(CORE / name for name in CAPTURERS))


def code_of(cls: type) -> str:
    """Digest of the code that a class of a plugin comes from: all files of its package, or its module; empty where there are no files.

    Of classes of the core, that is ``judging_code`` and the module.
    """
    name = cls.__module__
    top = name.partition(".")[0]
    if top == CORE.name:
        return judging_code() + _module_digest(name)
    module = sys.modules.get(top)
    folders = list(getattr(module, "__path__", ()))
    return _folder_digest(tuple(map(str, folders))) if folders else _module_digest(name)


@functools.cache
def _folder_digest(folders: tuple[str, ...]) -> str:
    return digest_of(*map(Path, folders))


def _module_digest(name: str) -> str:
    file = getattr(sys.modules.get(name), "__file__", None)
    return digest_of(Path(file)) if file else ""


def digest_of(*paths: Path) -> str:
    """Digest of files, and of all files below folders, with their names; what is compiled from them does not count."""
    found = hashlib.sha256()
    for path in paths:
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix not in _COMPILED) if path.is_dir() else [path]
        for file in files:
            data = file.read_bytes()
            found.update(f"{file.relative_to(path.parent).as_posix()}\0{len(data)}\0".encode() + data)
    return found.hexdigest()[:32]
