"""What parts of a module do not have by themselves, and forwards of one's own ask for: what is put there later is a change.

A class gives a value that an object of it may be given another one for; ``hasattr`` and ``getattr`` ask for what may never be there.
"""

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from .by_class import by_class
from .installed_packages import is_own_class

if TYPE_CHECKING:
    import torch

_PLAIN = (bool, int, float, complex, str, tuple, type(None))
_READ, _OF = ("LOAD_ATTR", "LOAD_METHOD"), ("LOAD_FAST", "LOAD_DEREF")  # and what later Pythons make of two of these


def class_values(kind: type) -> Iterator[str]:
    """Names of the plain values that classes of one's own among ``kind`` and its bases give to all objects."""
    seen = set[str]()
    for one in kind.__mro__:
        for name, value in vars(one).items():
            if name not in seen and isinstance(value, _PLAIN) and not name.startswith("__") and is_own_class(one):
                yield name
            seen.add(name)


def absent(part: "torch.nn.Module") -> Iterator[tuple[dict[str, Any], str]]:
    """The mappings of a part in which something would stand that its own methods ask for, and that it has nowhere."""
    tables = (part._modules, part._parameters, part._buffers, part.__dict__)
    for name in sorted(_asked_of(type(part))):
        if not any(name in table for table in tables):
            yield from ((table, name) for table in tables)


@by_class
def _asked_of(kind: type) -> frozenset[str]:
    """Names of what methods of one's own ask of the object that they are called on, of such methods, and of values of its classes."""
    functions = [(name, value) for one in kind.__mro__ if is_own_class(one) for name, value in vars(one).items()
                 if isinstance(value, FunctionType) and (not name.startswith("__") or name == "__call__")]
    read = {name for _, function in functions for name in _read_of(function.__code__)}
    named = {name for name, _ in functions if name not in ("forward", "__call__")}
    return frozenset(name for name in {*read, *named, *class_values(kind)} if not name.startswith("__"))


def _read_of(code: CodeType) -> Iterator[str]:
    """Attributes that code reads of its first argument, and the words in it, which ``getattr`` and ``hasattr`` may be given."""
    first = code.co_varnames[0] if code.co_argcount else ""
    return _read_within(code, first)


def _read_within(code: CodeType, first: str) -> Iterator[str]:
    loaded: Any = None
    for one in dis.get_instructions(code):
        if one.opname in _READ and loaded == first:
            yield str(one.argval)
        if one.opname != "EXTENDED_ARG":
            loaded = one.argval if one.opname.startswith(_OF) else None
            loaded = loaded[-1] if isinstance(loaded, tuple) else loaded
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
        elif isinstance(constant, CodeType):
            yield from _read_within(constant, first)
