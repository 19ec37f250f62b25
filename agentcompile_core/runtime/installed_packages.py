"""Which files belong to the standard library and to installed packages, and which modules are one's own: for captures and for what runs."""

import os
import sys
import sysconfig
from functools import cache
from importlib.metadata import distributions
from typing import Any

_FOLDERS = ("site-packages", "dist-packages")
_LIBRARIES = ("torch", "transformers", "peft", "accelerate")  # wherever they lie


@cache
def standard_folder() -> str:
    """Where the standard library really lies, with a separator at the end."""
    return os.path.join(os.path.realpath(sysconfig.get_path("stdlib")), "")


@cache
def is_standard_file(path: str) -> bool:
    """Whether a source file is part of the standard library."""
    if path.startswith("<"):  # no file: a path of it would lie in whatever folder is the current one
        return path.startswith("<frozen ")
    real = os.path.realpath(path)
    return real.startswith(standard_folder()) and not is_installed(real)


def is_installed(path: str) -> bool:
    """Whether a source file was installed as part of a package."""
    return bool(package_of(path))


@cache
def package_of(path: str) -> str:
    """The folder or file in a folder of installed packages that a source file belongs to; empty: it was not installed.

    Either where it was imported from counts, or what lies there: installers make links to what they keep elsewhere.
    """
    if not path or path.startswith("<"):
        return ""
    return _package_in(path) or _package_in(os.path.realpath(path))


def is_own_module(name: Any) -> bool:
    """Whether the module that a class says it is of belongs to no installed package, not to the standard library and not to this one.

    A file of one's own may be called as a module of the standard library is; what has no file is known by its name.
    """
    root = name.partition(".")[0] if isinstance(name, str) else "builtins"
    if root in _LIBRARIES or root.startswith("agentcompile_"):
        return False
    path = getattr(sys.modules.get(name), "__file__", None)
    if path is None:
        return root not in sys.stdlib_module_names
    is_standard = is_standard_file(path) and root != "__main__"  # a profiler runs one's program under the name that it has itself
    return not is_standard and not is_installed(path)


def _package_in(path: str) -> str:
    parts = path.replace("\\", "/").split("/")
    for at in reversed(range(len(parts) - 1)):
        if parts[at] in _FOLDERS:
            return parts[at + 1]
    folder, recorded = _beside_torch()
    found = path.removeprefix(folder).partition(os.sep)[0] if path.startswith(folder) else ""
    return found if found in recorded else ""


@cache
def _beside_torch() -> tuple[str, frozenset[str]]:
    """The folder that torch was installed into, which may have any name (``pip install --target``), and what installers recorded there.

    One's own files may lie beside it, in such a folder or in a checkout of torch.
    """
    import torch

    folder = os.path.dirname(os.path.dirname(os.path.abspath(str(torch.__file__))))
    found = () if os.path.basename(folder) in _FOLDERS else distributions(path=[folder])
    return os.path.join(folder, ""), frozenset(file.parts[0] for one in found for file in one.files or ())
