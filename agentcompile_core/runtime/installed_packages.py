"""Which files belong to the standard library and to installed packages, and whose modules and classes are: for captures and what runs."""

import csv
import os
import sys
import sysconfig
from contextlib import suppress
from functools import cache
from importlib.metadata import distributions
from typing import Any

VERSIONED = ("torch", "transformers", "numpy", "agentcompile_core")  # their versions stand for their source in keys of captures
LIBRARIES = (*VERSIONED, "peft", "accelerate")  # wherever they lie
_FOLDERS = ("site-packages", "dist-packages")
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8


@cache
def standard_folders() -> tuple[str, ...]:
    """Where the standard library really lies, with a separator at the end: its sources, and the archive that it may be imported from."""
    found = (sysconfig.get_path("stdlib"), *(() if _is_frozen() else (os.path.dirname(os.__file__),)))
    return tuple(dict.fromkeys(os.path.join(os.path.realpath(folder), "") for folder in found))


@cache
def is_standard_file(path: str) -> bool:
    """Whether a source file is part of the standard library."""
    if path.startswith("<"):  # no file: a path of it would lie in whatever folder is the current one
        return path.startswith("<frozen ")
    real = os.path.realpath(path)
    return real.startswith(standard_folders()) and not is_installed(real)


def is_installed(path: str) -> bool:
    """Whether a source file was installed as part of a package."""
    return bool(package_of(path))


@cache
def package_of(path: str) -> str:
    """The folder or file in a folder of installed packages that a source file belongs to; empty: it was not installed.

    Either where it was imported from counts, or what lies there: installers make links to what they keep elsewhere. A package whose folder
    is a link counts by what it leads to: installers that leave a package where it is being written make such links.
    """
    if not path or path.startswith("<"):
        return ""
    path = os.path.abspath(path)
    name, place = _package_in(path)
    is_elsewhere = bool(place) and os.path.islink(place) and os.path.isdir(place)
    return name if name and not is_elsewhere else _package_in(os.path.realpath(path))[0]


def root_of(name: Any) -> str:
    """The package that the name of a module begins with. A class of C may say no name."""
    return name.partition(".")[0] if isinstance(name, str) else "builtins"


def home_of(name: Any) -> tuple[str, str]:
    """The package that the name of a module begins with, and the module's file; empty: it has none, or is not imported.

    Of ``__main__`` nobody knows the file: a profiler runs one's program under that name, which it has itself. A class of C may say no name.
    """
    if not isinstance(name, str):
        return "builtins", ""
    path = None
    with suppress(Exception):  # whatever a module raises that makes its names as they are asked for
        path = None if name == "__main__" else getattr(sys.modules.get(name), "__file__", None)
    return root_of(name), path if isinstance(path, str) else ""


def is_own_module(name: Any) -> bool:
    """Whether the module that a class says it is of belongs to no installed package, not to the standard library and not to this one.

    A file of one's own may be called as a module of the standard library is; what has no file, or lies in an application's archive, is
    known by its name.
    """
    root, path = home_of(name)
    if root in LIBRARIES:
        return False
    if not path or _is_frozen():
        return root not in sys.stdlib_module_names and not is_installed(path)
    return not is_standard_file(path) and not is_installed(path)


def is_own_class(kind: type) -> bool:
    """Whether no installed package, and not this one, defines a class: one that is made at run time is nobody else's, but for those that a
    library's own code makes as it goes (torch.fx, of each of its modules)."""
    said: Any = kind.__module__
    return root_of(said) not in LIBRARIES and (is_own_module(said) or not is_found(kind))


def is_found(kind: type) -> bool:
    """Whether the module that a class says it is of holds it under the class's own name; true of types of C, which cannot be changed.

    What is made at run time says what it likes: ``make_dataclass`` of Python 3.11 that it is of ``types``, code without a name for its
    module that it is of ``builtins``.
    """
    if not kind.__flags__ & _HEAP_TYPE or kind.__flags__ & _IMMUTABLE_TYPE:
        return True
    said: Any = kind.__module__
    found: Any = sys.modules.get(said) if isinstance(said, str) else None
    with suppress(Exception):  # whatever a module raises that makes its names as they are asked for
        for part in kind.__qualname__.split("."):
            found = getattr(found, part, None)
    return found is kind


def _is_frozen() -> bool:
    """Whether this is an application that brings its modules along, in one folder or archive."""
    return bool(getattr(sys, "frozen", False))


def _package_in(path: str) -> tuple[str, str]:
    """The package of a path by the folders in it, and where that lies; empty: of none, or by what was recorded beside torch."""
    parts = path.replace("\\", "/").split("/")
    for at in reversed(range(len(parts) - 1)):
        if parts[at] in _FOLDERS:
            return parts[at + 1], "/".join(parts[: at + 2])
    folder, recorded = _beside_torch()
    found = path.removeprefix(folder).partition(os.sep)[0] if path.startswith(folder) else ""
    return (found if found in recorded else ""), ""


@cache
def _beside_torch() -> tuple[str, frozenset[str]]:
    """The folder that torch was installed into, which may have any name (``pip install --target``), and what installers recorded there.

    One's own files may lie beside it, in such a folder or in a checkout of torch.
    """
    import torch

    folder = os.path.dirname(os.path.dirname(os.path.abspath(str(torch.__file__))))
    found = () if os.path.basename(folder) in _FOLDERS else distributions(path=[folder])
    recorded = (row[0] for one in found for row in csv.reader((one.read_text("RECORD") or "").splitlines()) if row and row[0])
    return os.path.join(folder, ""), frozenset(name.replace("\\", "/").partition("/")[0] for name in recorded)
