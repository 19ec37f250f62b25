"""Canonical digests of Python objects: values, functions by what they execute, classes, and modules with all they hold.

The same object gives the same digest in every process of one Python version: no address, no identity and no order of a
set enters. What has no stable form is named in ``unstable``; a digest that is unstable must not serve as a key.
"""

import collections
import collections.abc
import enum
import functools
import hashlib
import logging
import pathlib
import random
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from . import libraries
from .code_digest import Calls, code_parts, join, reaching

TOO_DEEP, TOO_MANY = "its objects are nested too deeply", "it refers to too many objects"
MAX_OBJECTS = 200_000
MAX_TENSOR_BYTES = 64 << 20
_SKIPPED = frozenset({
    "__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__",
    "__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__",
    "__dataclass_fields__", "__dataclass_params__", "__attrs_attrs__", "__attrs_props__", "__attrs_own_setattr__", "__match_args__",
})
_BY_TEXT = (torch.dtype, torch.layout, torch.memory_format, range, slice, pathlib.PurePath)
ITERATOR = "it holds an iterator, whose place has no stable form"
_HEAP_TYPE = 1 << 9
_FIELD = type(vars(collections.namedtuple("_FIELD", "first"))["first"])
_CODE = (FunctionType, MethodType, type, functools.partial)
_WITHOUT_STATE = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
                  types.ClassMethodDescriptorType)


class Digests:
    """One walk: every object is looked at once. ``unstable`` says what has no stable form.

    ``modules`` digests a torch module; ``names`` are those of registered tensors by ``id``, which count by name, not by value.
    """

    def __init__(self, modules: Callable[["Digests", nn.Module], str], names: Mapping[int, str]) -> None:
        self.unstable: list[str] = []
        self.libraries: set[str] = {"torch", "torch.nn.functional"}
        self._modules, self._names = modules, names
        self._memo: dict[int, tuple[object, str]] = {}
        self._open: set[int] = set()
        self._calls = Calls(self)
        self._passing = False

    def of(self, value: Any) -> str:
        """The digest of any object; constant text where it has no stable form."""
        cls = type(value)
        if cls in libraries.PLAIN:
            return f"{cls.__name__}={value.hex() if cls is float else value!r}"
        if name := reaching(value):
            return self.give_up(f"its code uses {name}")
        key = id(value)
        if key in self._memo:
            return self._memo[key][1]
        if key in self._open:
            return f"cycle={cls.__qualname__}"
        if len(self._memo) >= MAX_OBJECTS:
            return self.give_up(TOO_MANY)
        self._open.add(key)
        try:
            found = self._form(value)
        except RecursionError:
            found = self.give_up(TOO_DEEP)
        except Exception as exc:  # whatever somebody's class raises where it is looked at
            found = self.give_up(f"a {cls.__qualname__} raises {type(exc).__name__} where its attributes are looked at")
        finally:
            self._open.discard(key)
        self._memo[key] = (value, found)  # held, so that its address is not used again
        return found

    def met(self) -> Iterator[Any]:
        """Whatever it looked at, but for plain values and modules."""
        return (value for value, _ in self._memo.values())

    def modules_met(self) -> Iterator[tuple[ModuleType, frozenset[str]]]:
        """The Python modules that code names, and which of their names it means."""
        return iter(self._calls.met.values())

    def give_up(self, why: str) -> str:
        """Record that something has no stable form."""
        if why not in self.unstable:
            self.unstable.append(why)
        return f"unstable={why}"

    @contextmanager
    def in_passing(self) -> Iterator[None]:
        """A block in which what has no stable form is left out: it counts where it is met again. Blocks within one are parts of it.

        What was not read, of too many or too deep ones, stays a reason to have no digest.
        """
        if self._passing:
            yield
            return
        self._passing = True
        known, seen, libraries_, stable = dict(self._memo), dict(self._calls.seen), set(self.libraries), len(self.unstable)
        try:
            yield
        finally:  # nothing that was met here alone is known, so that it is looked at where it is met again
            unread = [why for why in self.unstable[stable:] if why in (TOO_DEEP, TOO_MANY)]
            self.unstable[stable:] = unread
            self._memo, self._calls.seen, self.libraries, self._passing = known, seen, libraries_, False

    def changes(self) -> str:
        """Digest of what was replaced at run time in the modules of libraries that the walk came across."""
        done: dict[str, str] = {}
        while self.libraries - done.keys():
            for name in sorted(self.libraries - done.keys()):
                module = sys.modules.get(name)
                names = libraries.changed_names(module) if module is not None else []
                done[name] = join(*(text for n in names for text in (n, self.changed(vars(module)[n])))) if names else ""
        return join(*(text for name in sorted(done) if done[name] for text in (name, done[name])))

    def changed(self, value: Any) -> str:
        """What stands in a library's module under another name than its own; closely only where it is no library's."""
        plain = type(value) in libraries.PLAIN
        return self.of(value) if plain or libraries.is_foreign(value) else libraries.name_of(value)

    def lenient(self, value: Any) -> str:
        """As ``of``, but an object that only libraries define counts by its type."""
        kinds = (FunctionType, MethodType, type, nn.Module, functools.partial, *libraries.PLAIN)
        if isinstance(value, kinds) or not libraries.is_library_module(type(value).__module__):
            return self.of(value)
        if isinstance(value, (dict, MappingProxyType, list, tuple, set, frozenset)):  # caches come and go, what a user put there counts
            items = (*value.keys(), *value.values()) if isinstance(value, (dict, MappingProxyType)) else value
            return join("holding", *sorted(self.of(item) for item in items if isinstance(item, _CODE) and libraries.is_foreign(item)))
        return libraries.builtin_name(value) or f"library={type(value).__qualname__}"

    def _form(self, value: Any) -> str:
        if isinstance(value, type):
            return self.klass(value)
        if isinstance(value, FunctionType):
            return self._calls.function(value)
        for kind, form in self._forms():
            if isinstance(value, kind):
                return form(value)
        if callable(value) and not isinstance(type(value).__call__, FunctionType):
            return self._builtin(value)
        return self._object(value)

    def _forms(self) -> Iterable[tuple[Any, Callable[[Any], str]]]:
        return (
            (nn.Module, lambda v: self._modules(self, v)),
            (Tensor, self.tensor),
            (MethodType, lambda v: join("method", self.of(v.__func__), self.of(v.__self__))),
            (ModuleType, lambda v: self._calls.module(v, ())),
            (CodeType, lambda v: join("code", *code_parts(self, v))),
            (functools.partial, lambda v: join("partial", self.of(v.func), self.of(v.args), self.of(v.keywords))),
            (enum.Enum, lambda v: join("enum", type(v).__qualname__, v.name, self.of(v.value))),
            (torch.device, lambda v: "device"),
            (_BY_TEXT, lambda v: join(type(v).__name__, str(v))),
            (re.Pattern, lambda v: join("pattern", repr(v.pattern), str(v.flags))),
            ((dict, MappingProxyType), self._mapping),
            (collections.deque, lambda v: join("deque", self._type(v), str(v.maxlen), *map(self.of, v), *self._state(v))),
            ((list, tuple), lambda v: join("items", self._type(v), *map(self.of, v), *self._state(v))),
            ((set, frozenset), lambda v: join("set", self._type(v), *sorted(map(self.of, v)))),
            ((int, float, complex, str, bytes, bytearray), lambda v: join("value", self._type(v), _base_text(v), *self._state(v))),
            ((numpy.ndarray, numpy.generic), lambda v: join("array", str(v.dtype), str(v.shape), v.tobytes().hex())),
            ((staticmethod, classmethod), lambda v: join(type(v).__name__, self.of(v.__func__))),
            (property, lambda v: join("property", self.of(v.fget), self.of(v.fset), self.of(v.fdel))),
            (functools.cached_property, lambda v: join("cached", self.of(v.func))),
            (functools._lru_cache_wrapper, lambda v: join("lru", self.of(v.__wrapped__))),
            (weakref.ReferenceType, lambda v: join("weak", self.of(v()))),
            (logging.Logger, lambda v: "logger"),
            (random.Random, lambda v: join("random", type(v).__qualname__, repr(v.getstate()))),
            (numpy.random.RandomState, lambda v: join("random", repr(v.get_state(legacy=False)))),
            (numpy.random.Generator, lambda v: join("random", repr(v.bit_generator.state))),
            ((torch._ops.OpOverload, torch._ops.OpOverloadPacket), lambda v: join("op", str(v))),
        )

    def klass(self, cls: type) -> str:
        """A class: by name and what was changed in it where a library defines it, else by all it defines; and its bases."""
        own = self._memo.get(id(cls))
        if own is not None:
            return own[1]
        library = libraries.is_library_class(cls)
        if library:
            self.libraries.add(cls.__module__)
        items = [(n, v) for n, v in sorted(vars(cls).items(), key=lambda item: str(item[0])) if n not in _SKIPPED]
        if library:
            items = [(n, v) for n, v in items if not libraries.is_native(cls, n, v)]
        name = f"{cls.__module__}.{cls.__qualname__}" if library else cls.__qualname__.rpartition("<locals>.")[2]
        parts = [text for n, v in items for text in (n, self._attribute(v, library))]
        bases = [self.klass(base) for base in cls.__mro__[1:] if base is not object]
        bases += [self.klass(type(cls))] if type(cls) is not type and type(cls) is not cls else []
        found = join("class", name, *parts, "bases", *bases)
        self._memo[id(cls)] = (cls, found)
        return found

    def _attribute(self, value: Any, library: bool) -> str:
        if isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)):
            return "slot"
        if isinstance(value, _FIELD):
            return f"field={value.__reduce__()[1][0]}"
        return self.lenient(libraries.function_of(value) if isinstance(value, property) else value) if library else self.of(value)

    def tensor(self, value: Tensor) -> str:
        """A registered tensor by name, another one by its bytes, one without data by shape and type."""
        if id(value) in self._names:
            return f"registered={self._names[id(value)]}"
        facts = [str(tuple(value.shape)), str(value.dtype), str(value.stride()) if value.layout is torch.strided else str(value.layout)]
        if value.is_meta:
            return join("tensor", *facts)
        if value.layout is not torch.strided or value.is_quantized or value.numel() * value.element_size() > MAX_TENSOR_BYTES:
            return self.give_up("it holds a large or unusual tensor that is no parameter")
        data = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach()).view(-1).view(torch.uint8)
        return join("tensor", *facts, hashlib.sha256(data.numpy().tobytes()).hexdigest())

    def _type(self, value: Any) -> str:
        cls = type(value)
        return cls.__name__ if cls.__module__ in ("builtins", "collections") else self.klass(cls)

    def _mapping(self, value: Any) -> str:
        items = (text for k, v in value.items() for text in (self.of(k), self.of(v)))
        makes = self.of(value.default_factory) if isinstance(value, collections.defaultdict) else ""
        return join("mapping", self._type(value), makes, *items, *self._state(value))

    def _state(self, value: Any) -> list[str]:
        """The attributes of an object, by name."""
        found = dict(getattr(value, "__dict__", {}))
        for cls in type(value).__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                name = f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    found[name] = getattr(value, name)
        return [text for name in sorted(found, key=str) for text in (str(name), self.of(found[name]))]

    def _builtin(self, value: Any) -> str:
        name = libraries.builtin_name(value)
        if not name or "<" in name:
            return self.give_up(f"it calls {getattr(value, '__name__', type(value).__name__)}, whose code is not Python")
        if not isinstance(value, _WITHOUT_STATE):  # an object of C that is called: what it was made of
            return join("called", name, *self._made_of(value))
        owner = getattr(value, "__self__", None)
        bound = owner is not None and not isinstance(owner, (ModuleType, type))
        return join("builtin", name, self.of(owner) if bound else "")

    def _made_of(self, value: Any) -> list[str]:
        try:
            made = value.__reduce_ex__(2)
        except Exception:  # whatever an extension raises
            return [self.give_up(f"it calls a {type(value).__qualname__}, whose state is not Python's")]
        return [made] if isinstance(made, str) else [self.of(part) for part in made[1:3]]

    def _object(self, value: Any) -> str:
        cls = type(value)
        if cls is object:
            return "object"
        if isinstance(value, collections.abc.Iterator):
            return self.give_up(ITERATOR)
        python = [c for c in cls.__mro__ if c is not object]
        stated = hasattr(value, "__dict__") or any("__slots__" in vars(c) for c in python)
        if not stated or any(not c.__flags__ & _HEAP_TYPE for c in python):
            return self.give_up(f"it holds a {cls.__qualname__}, which has no stable form")
        return join("object", self.klass(cls), *self._state(value))


def _base_text(value: Any) -> str:
    for base in (bool, int, float, complex, str, bytes, bytearray):
        if isinstance(value, base):
            return base.__repr__(value)
    return ""
