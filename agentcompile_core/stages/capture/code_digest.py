"""What a Python function executes: its code, its closure and defaults, and every function, class and value its code names."""

import builtins
import dis
import functools
import hashlib
import importlib
import inspect
import os
import pkgutil
import runpy
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol

from . import libraries


class Walk(Protocol):
    """The digests of objects, as far as those of functions need them."""

    libraries: set[str]

    def of(self, value: Any) -> str:
        """The digest of any value."""

    def lenient(self, value: Any) -> str:
        """The digest of a value that a library holds."""

    def give_up(self, why: str) -> str:
        """Note that something has no stable digest."""

    def in_passing(self) -> AbstractContextManager[None]:
        """A block in which what has no stable digest may be left out."""


# What reads the world outside of the objects that a function names, so that its effect has no digest.
_OUTSIDE = frozenset({"eval", "exec", "globals", "locals", "__import__", "import_module", "open", "environ", "getenv", "__globals__",
                      "f_globals", "f_locals", "_getframe", "currentframe", "resolve_name", "run_path", "run_module"})
# The same under any name that code gives them; of modules that code finds there by text, nobody knows which they are.
_REACHING = {id(value): name for value, name in (
    (eval, "eval"), (exec, "exec"), (globals, "globals"), (locals, "locals"), (__import__, "__import__"), (open, "open"),
    (importlib.import_module, "import_module"), (os.environ, "environ"), (os.getenv, "getenv"), (sys.modules, "sys.modules"),
    (sys._getframe, "_getframe"), (inspect.currentframe, "currentframe"), (inspect.stack, "inspect.stack"),
    (pkgutil.resolve_name, "resolve_name"), (runpy.run_path, "run_path"), (runpy.run_module, "run_module"))}
_CODE = (FunctionType, type, ModuleType, functools.partial)
_FIXED = (*libraries.PLAIN, tuple, frozenset, range)
# Where code names one of these beside a module, any name of that module may be meant.
_ANY_NAME = frozenset({"getattr", "vars", "__dict__", "attrgetter", "methodcaller", "getattr_static", "getmembers", "__getattribute__"})
_CHANGING = frozenset({"random", "time", "secrets", "uuid", "datetime"})


def join(*parts: str) -> str:
    """Digest of texts, each with its length, so that no two lists collide."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        found.update(b"%d:" % len(data))
        found.update(data)
    return found.hexdigest()


def code_parts(digests: Walk, code: CodeType) -> Iterator[str]:
    """The bytecode and constants of a code object, with its nested ones; neither file nor lines."""
    yield code.co_code.hex()
    yield from (code.co_exceptiontable.hex(), str(code.co_flags))
    yield str((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount))
    for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
        yield repr(names)
    for constant in code.co_consts:
        yield digests.of(constant)


def names_of(code: CodeType) -> set[str]:
    """Names of globals and attributes in a code object and its nested ones."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_of(constant)
    return found


def imports_of(code: CodeType) -> Iterator[tuple[str, int]]:
    """Names and levels of modules that the code imports while it runs."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from imports_of(constant)
    if dis.opmap["IMPORT_NAME"] not in code.co_code[::2]:
        return
    instructions = list(dis.get_instructions(code))
    for index, instruction in enumerate(instructions):
        if instruction.opname == "IMPORT_NAME":
            levels = [i.argval for i in instructions[max(0, index - 3):index] if isinstance(i.argval, int) and i.opname != "EXTENDED_ARG"]
            yield str(instruction.argval), levels[0] if levels else 0


def _unwrapped(value: Any) -> Any:
    """The function behind what a decorator made of it, a cache say; functions and other values as they are."""
    if isinstance(value, _CODE):
        return value
    try:
        return inspect.unwrap(value)
    except Exception:  # an object that raises when it is asked for any attribute
        return value


def reaching(value: Any) -> str:
    """What ``value`` is called where it reads the world outside of the objects that a function names; empty where it does not."""
    return _REACHING.get(id(value), "")


class Calls:
    """Digests functions, and modules as far as functions name their contents."""

    def __init__(self, digests: Walk) -> None:
        self._digests = digests
        self.seen: dict[tuple[int, frozenset[str]], str] = {}
        self.met: dict[tuple[int, frozenset[str]], tuple[ModuleType, frozenset[str]]] = {}  # the same, with the names that are meant
        self._passed: dict[int, str] = {}  # by module

    def function(self, function: FunctionType) -> str:
        """A function of a library by its place and closure, another one by what it executes."""
        code, of = function.__code__, self._digests.of
        if libraries.is_library_function(function) and "<lambda>" not in code.co_qualname:
            if libraries.is_library_module(function.__module__ or ""):
                self._digests.libraries.add(function.__module__)
            return join("library", libraries.code_name(code), *self._cells(function, self._digests.lenient))
        defaults = (of(function.__defaults__), of(function.__kwdefaults__))
        own = {k: v for k, v in vars(function).items() if k != "__wrapped__" and not k.startswith("__")}
        return join("function", *code_parts(self._digests, code), *defaults, *self._cells(function, of), of(own),
                    *self._named(function))

    @staticmethod
    def _cells(function: FunctionType, of: Any) -> list[str]:
        found = []
        for cell in function.__closure__ or ():
            try:
                found.append(of(cell.cell_contents))
            except ValueError:
                found.append("empty")
        return found

    def _named(self, function: FunctionType) -> Iterator[str]:
        names = names_of(function.__code__)
        outside = sorted((names & _OUTSIDE) - function.__globals__.keys())
        if outside:
            self._digests.give_up(f"its code uses {outside[0]}")
        yield from self._values(names, function.__globals__)
        for name, level in imports_of(function.__code__):
            package = str(function.__globals__.get("__package__") or "")
            full = ".".join(filter(None, (package.rsplit(".", level - 1)[0] if level else "", name)))
            yield self._imported(full, names)

    def _imported(self, name: str, names: set[str]) -> str:
        module = sys.modules.get(name)
        if module is None:
            return self._digests.give_up(f"its code imports {name} when it runs")
        return self.module(module, names)

    def _values(self, names: Iterable[str], scope: dict[str, Any]) -> Iterator[str]:
        names = set(names)
        for name in sorted(names):
            if name in scope:
                value = scope[name]
                yield name
                yield self.module(value, names) if isinstance(value, ModuleType) else self._digests.of(value)
            elif hasattr(builtins, name):
                yield f"builtin {name}"

    def module(self, module: ModuleType, names: Iterable[str]) -> str:
        """A module: what ``names`` mean in it, and, of one that is no library's, in passing all its code and fixed values: there are many
        ways to look an attribute up (``vars``, ``operator.attrgetter``, a format, a pattern), here or in what it is handed to."""
        wanted = frozenset(names)
        library = libraries.is_library_module(module.__name__)
        if library and module.__name__ in _CHANGING:
            return self._digests.give_up(f"its code uses {module.__name__}")
        if module is sys and "modules" in wanted:
            return self._digests.give_up("its code uses sys.modules")
        key = (id(module), wanted)
        if key in self.seen:
            return self.seen[key]
        self.seen[key] = "cycle"
        if library:
            self._digests.libraries.add(module.__name__)
            chosen = wanted
        else:
            chosen = wanted if wanted and not wanted & _ANY_NAME else frozenset(n for n in vars(module) if not n.startswith("__"))
        self.met[key] = module, chosen
        parts = [text for name in sorted(chosen & vars(module).keys()) for text in (name, self._member(module, name, wanted, library))]
        parts += [] if library else [self._in_passing(module)]
        self.seen[key] = join("module", module.__name__ if library else "", *parts)
        return self.seen[key]

    def _in_passing(self, module: ModuleType) -> str:
        """All code and fixed values of a module, once in a walk. Not what comes and goes where no code of it is named (caches, open files),
        nor what belongs to another package that somebody installed."""
        key = id(module)
        if key in self._passed:
            return self._passed[key]
        names = sorted(n for n, value in vars(module).items() if not n.startswith("__") and
                       (isinstance(value, _FIXED) or (isinstance(_unwrapped(value), _CODE)
                        and not libraries.of_another_package(value, module))))
        self._passed[key] = "cycle"
        try:
            with self._digests.in_passing():
                found = join(*(text for n in names for text in (n, self._passed_by(vars(module)[n]))))
        except BaseException:
            del self._passed[key]
            raise
        self._passed[key] = found
        return found

    def _passed_by(self, value: Any) -> str:
        if not isinstance(value, ModuleType):
            return self._digests.of(_unwrapped(value))
        return self.module(value, ()) if libraries.is_library_module(value.__name__) else self._in_passing(value)

    def _member(self, module: ModuleType, name: str, wanted: frozenset[str], library: bool) -> str:
        value = vars(module)[name]
        if isinstance(value, ModuleType):
            return self.module(value, wanted)
        return self._digests.lenient(value) if library else self._digests.of(value)
