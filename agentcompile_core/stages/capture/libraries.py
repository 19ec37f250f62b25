"""What belongs to a library whose version stands for its source, and what somebody changed in it at run time."""

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
import transformers
from torch import nn

from ...runtime.installed_packages import (
    VERSIONED,
    home_of,
    is_found,
    is_installed,
    is_own_class,
    is_standard_file,
    package_of,
    standard_folders,
)

PLAIN: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
_AROUND = (FunctionType, MethodType, type, functools.partial, functools.partialmethod, functools._lru_cache_wrapper)
# What transformers puts into torch's Module as any model gets random weights: the same class as before, for whoever does not ask for it.
_PUT_THERE = frozenset({"smart_apply"})
# What torch puts around its own Module's as soon as anything was compiled by it, and the name by which it knows: they note who was made.
_AROUND_ITS_OWN = ("torch._dynamo.mutation_guard", "install_generation_tagging_init.<locals>.")
_TOLD_BY = "___needs_generation_tag_patch"


@cache
def _folders() -> tuple[str, ...]:
    packages = [str(Path(str(found.__file__)).parent) for found in (torch, transformers, numpy)]
    ours = str(Path(__file__).parents[1])
    return tuple(os.path.join(os.path.realpath(folder), "") for folder in (*packages, ours))


@cache
def is_library_file(path: str) -> bool:
    """Whether a source file is part of torch, transformers, numpy, the standard library or this package."""
    return is_standard_file(path) or (not path.startswith("<") and os.path.realpath(path).startswith(_folders()))


def is_library_module(name: str) -> bool:
    """Whether the imported module ``name`` is a library's; one of C counts by its package."""
    root, path = home_of(name)
    return root in VERSIONED or (is_library_file(path) if path else root in sys.stdlib_module_names)


def is_library_class(cls: type) -> bool:
    """Whether ``cls`` is found in a library under its own name; a class made at run time is not."""
    return is_library_module(cls.__module__) and is_found(cls)


def code_name(code: CodeType) -> str:
    """Where in its library a function was written: file and qualified name."""
    path = code.co_filename if code.co_filename.startswith("<") else os.path.realpath(code.co_filename)
    folder = next((f for f in (*_folders(), *standard_folders()) if path.startswith(f)), "")
    root = os.path.basename(os.path.dirname(folder)) if folder in _folders() else ""
    return f"{root}/{path.removeprefix(folder)}:{code.co_qualname}"


def builtin_name(value: Any) -> str:
    """Name of a callable of C that has one place, such as ``torch._C._nn.gelu``; empty where it is nobody's known."""
    owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
    if isinstance(owner, ModuleType):
        module = owner.__name__
    elif isinstance(owner, type):
        module = f"{owner.__module__}.{owner.__qualname__}"
    else:
        module = str(getattr(value, "__module__", None) or type(value).__module__)
    root = module.partition(".")[0]
    known = root in VERSIONED or root in ("builtins", "agentcompile") or root in sys.stdlib_module_names
    return f"{module}.{getattr(value, '__name__', type(value).__name__)}" if known else ""


def function_of(value: Any) -> Any:
    """The function behind a static method, class method or property; other values as they are."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def is_library_function(function: FunctionType) -> bool:
    """Whether a library wrote this function, or made it at import. A wrapper says that it is of the module of what it wraps."""
    path = function.__code__.co_filename
    return is_library_file(path) or (path.startswith("<") and is_library_module(function.__globals__.get("__name__", "")))


def is_foreign(value: Any) -> bool:
    """Whether a library holds something that nobody installed: a function, class or object of the user's, or one of its own around that."""
    kind = type(value)
    if kind is BuiltinFunctionType:  # of a class of C, and around nothing
        return False
    if kind is FunctionType and not value.__closure__:
        return _is_foreign(value)
    return any(map(_is_foreign, _layers_of(value)))


def _is_foreign(value: Any) -> bool:
    if type(value) is FunctionType:
        return not is_library_function(value) and not is_installed(value.__code__.co_filename)
    return is_own_class(value if isinstance(value, type) else type(value))


def _layers_of(value: Any) -> Iterator[Any]:
    """What stands in another's place, and what it calls: decorators and partial calls of libraries say nothing of what is within."""
    seen: set[int] = set()
    left = [function_of(value)]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, FunctionType):
            left += [within for within in _closed_over(one) if isinstance(within, _AROUND)]
        elif isinstance(one, MethodType):
            left += [one.__func__, one.__self__]
        elif isinstance(one, (functools.partial, functools.partialmethod)):
            left += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, functools._lru_cache_wrapper):
            left.append(one.__wrapped__)


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing was put into it yet
            yield cell.cell_contents


def of_another_package(value: Any, module: ModuleType) -> bool:
    """Whether a function, class or module that ``module`` holds belongs to an installed package that ``module`` does not belong to.

    A function counts by the module that wrote it, not by the decorator's code around it.
    """
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    package = package_of(home_of(home)[1])
    return bool(package) and package != package_of(home_of(module.__name__)[1])


def is_native(cls: type, name: str, value: Any) -> bool:
    """Whether attribute ``name`` of a library's class is what the library wrote there."""
    function = function_of(value)
    if name in _PUT_THERE and type(function) is FunctionType and is_library_function(function):
        return True
    if cls is nn.Module and (name == _TOLD_BY or _is_around_its_own(name, function)):
        return True
    if type(function) is FunctionType:
        code, home = function.__code__, getattr(sys.modules.get(cls.__module__), "__file__", None)
        same = code.co_filename == home and code.co_qualname == f"{cls.__qualname__}.{name}"
        return same and code.co_freevars in ((), ("__class__",))
    return not isinstance(function, PLAIN) and not is_foreign(function)


def _is_around_its_own(name: str, function: Any) -> bool:
    if type(function) is not FunctionType or function.__module__ != _AROUND_ITS_OWN[0] or not is_library_function(function):
        return False
    within = [cell.cell_contents for cell in function.__closure__ or ()]
    return function.__code__.co_qualname.startswith(_AROUND_ITS_OWN[1]) and all(is_native(nn.Module, name, one) for one in within)


def changed_names(module: ModuleType) -> list[str]:
    """Names in a library's module that do not hold what is called so there: replaced functions, classes and objects."""
    found = []
    for name, value in list(vars(module).items()):
        if name.startswith("__") or issubclass(type(value), ModuleType):
            continue
        if type(value) in (FunctionType, BuiltinFunctionType):
            native = value.__name__ == name and not is_foreign(value)
        elif type(value) in PLAIN:
            native = not module.__name__.startswith("transformers.models.")
        else:
            native = not is_foreign(value)
        if not native:
            found.append(name)
    return sorted(found)


def name_of(value: Any) -> str:
    """What a library calls a function or object of its own, for what needs no closer look."""
    if isinstance(value, FunctionType):
        return code_name(value.__code__)
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
