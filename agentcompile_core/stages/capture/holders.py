"""What lists, mappings, sets and objects hold that parts of a module lead to; given back to them behind a trial or a trace.

All of it or nothing: where attributes lead to something that cannot be given back, such as a mapping with methods of its own or what
another thread may be at work on, nothing but the attributes themselves is. What is half as it was is worse than what a trial left.
"""

import array
import sys
import threading
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence, MutableSet
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from attrs import define, field
from torch import Tensor, nn

from ...runtime.by_class import by_class
from ...runtime.held import is_own_object, is_plain_namespace, member_slots
from ...runtime.installed_packages import is_own_class
from ...runtime.module_changes import version_of

MOST = 20_000  # lists, mappings, sets and objects of one model
MOST_BYTES, LARGEST_BYTES = 64 << 20, 1 << 20  # of tensors and arrays in them whose numbers are kept: of all, and of one
_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = frozenset({list, deque, set, *_MAPPINGS})
_AROUND = (UserDict, UserList, ChainMap)  # objects of the standard library around containers
_CACHES = "transformers.cache_utils"  # objects of a library that forwards fill
_SHARED = frozenset({"_thread", "threading", "queue", "multiprocessing", "concurrent", "asyncio", "socket", "subprocess", "_io", "io"})
# What was put into a mapping meanwhile and stays there, such as an imported module in ``sys.modules``: nothing that a forward computes.
_STAYING = (ModuleType, type, FunctionType, BuiltinFunctionType, MethodType)
ABSENT = object()
_OF_ANY = frozenset({"__new__", "__init__", "__doc__", "__repr__", "__str__", "__hash__", "__class_getitem__", "__getattribute__", "copy",
                     "__reversed__", "__sizeof__", "__reduce__", "fromkeys"})  # of a container, which neither read nor write what it holds


class _Unknown(Exception):
    """Something that cannot be given back."""


class _TooMuch(Exception):
    """More than ``MOST``."""


@define
class Holders:
    """What was noted of containers, objects and tensors; ``put_back`` gives it to them again, where it is another one by now.

    ``opaque``: takes what cannot be given back; None: beside such a thing nothing is noted.
    """

    opaque: list[Any] | None = None
    _containers: list[tuple[Any, Any]] = field(factory=list)
    _objects: list[tuple[dict[str, Any], dict[str, Any]]] = field(factory=list)
    _slots: list[tuple[MemberDescriptorType, Any, Any]] = field(factory=list)
    _tensors: list[tuple[Tensor, Tensor, int]] = field(factory=list)
    _arrays: list[tuple[Any, Any]] = field(factory=list)
    _seen: dict[int, Any] = field(factory=dict)  # by address, which is theirs as long as they are here
    _left: int = MOST
    _left_bytes: int = MOST_BYTES

    def look_at(self, values: Iterable[Any], known: Iterable[Any] = ()) -> bool:
        """Note what can be reached from ``values``, but for what is ``known``: parts, parameters and buffers, which others look after.

        Whether all of it could be noted; else nothing is.
        """
        self._seen |= {id(one): one for one in known}
        left = deque(value for value in values if type(value) not in _SCALARS)
        try:
            while left:
                value = left.popleft()
                if id(value) not in self._seen:
                    self._seen[id(value)] = value
                    left += [one for one in self._noted_if_known(value) if type(one) not in _SCALARS]
        except Exception:  # _Unknown or _TooMuch, or whatever somebody's class raises where it is looked at
            for noted in (self._containers, self._objects, self._slots, self._tensors, self._arrays):
                noted.clear()
            return False
        return True

    def changed(self) -> bool:
        """Whether any of it holds something else by now; what only stays there (``stays_away``) is no change."""
        containers = any(_differs(value, held) for value, held in (*self._containers, *self._objects))
        slots = any(_read(slot, value) is not one for slot, value, one in self._slots)
        tensors = any(version_of(tensor) != version and not torch.equal(tensor, numbers) for tensor, numbers, version in self._tensors)
        return containers or slots or tensors or any(_bytes_of(value) != _bytes_of(numbers) for value, numbers in self._arrays)

    def put_back(self, in_place: Mapping[int, Any] = MappingProxyType({})) -> None:
        """Containers and objects hold what they held, and tensors and arrays the same numbers.

        ``in_place``: what they hold instead of something, by its address.
        """
        for value, held in (*self._containers, *self._objects):
            _refill(value, _replaced(held, in_place) if in_place else held)
        for slot, value, one in self._slots:
            if _read(slot, value) is not one:
                with suppress(AttributeError):  # a frozen object, of which somebody wrote past that
                    slot.__delete__(value) if one is ABSENT else slot.__set__(value, one)
        with torch.no_grad():
            for tensor, numbers, version in self._tensors:
                if version_of(tensor) != version and tensor.shape == numbers.shape:
                    with suppress(RuntimeError):
                        tensor.copy_(numbers)
        for value, numbers in self._arrays:
            with suppress(ValueError, BufferError):  # it may not be written to, and was not; somebody looks at a grown one
                value[... if isinstance(value, numpy.ndarray) else slice(None)] = numbers

    def _noted_if_known(self, value: Any) -> list[Any]:
        try:
            return self._noted(value)
        except _TooMuch:
            raise
        except Exception:  # _Unknown, or whatever somebody's class raises where it is looked at
            if self.opaque is None:
                raise
            self.opaque.append(value)
            return []

    def _noted(self, value: Any) -> list[Any]:
        """What lies in ``value``, which is noted."""
        kind = type(value)
        if isinstance(value, Tensor):
            self._note_numbers(value)
            return [value.__dict__]
        if kind in _CONTAINERS:
            if value is sys.modules:
                return []
            self._count(len(value))
            held = dict(value.items()) if kind in _MAPPINGS else set(value) if kind is set else list(value)
            self._containers.append((value, held))
            return list(held.values() if isinstance(held, dict) else held)
        if kind in (tuple, frozenset):
            return list(value)
        if kind is partial:
            return [value.func, value.args, value.keywords]
        if kind is MethodType:
            return [value.__self__, value.__func__]
        if kind in (numpy.ndarray, array.array, bytearray):
            self._note_array(value)
            return []
        if kind is threading.local and self.opaque is not None:  # of this thread
            return self._noted_object(value)
        if _is_plain_subclass(kind):
            self._count(len(value))
            held = dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)
            self._containers.append((value, held))
            return [*self._noted_object(value), *(held.values() if isinstance(held, dict) else held)]
        if isinstance(value, (list, dict, set, deque, bytearray, array.array)) or kind.__module__.partition(".")[0] in _SHARED:
            raise _Unknown
        if (isinstance(value, nn.Module) or is_plain_namespace(value) or kind in _AROUND or is_own_object(value)
                or kind.__module__ == _CACHES):
            return self._noted_object(value)
        if self.opaque is not None and isinstance(value, (MutableMapping, MutableSequence, MutableSet)):
            raise _Unknown  # a package's own, such as a mapping of weak keys
        return []

    def _noted_object(self, value: Any) -> list[Any]:
        self._count(1)
        attributes = value.__dict__ if hasattr(value, "__dict__") else {}
        if type(attributes) is not dict:
            raise _Unknown
        self._objects.append((attributes, dict(attributes)))
        slots = [(slot, value, _read(slot, value)) for _, slot in member_slots(type(value))]
        self._slots += slots
        return [*attributes.values(), *(one for *_, one in slots)]

    def _count(self, more: int) -> None:
        self._left -= 1 + more // 100
        if self._left < 0:
            raise _TooMuch

    def _note_numbers(self, tensor: Tensor) -> None:
        nbytes, overlaps = tensor.numel() * tensor.element_size(), 0 in tensor.stride() if tensor.layout is torch.strided else True
        if type(tensor) is Tensor and not tensor.is_meta and not tensor.is_inference() and not overlaps and self._are_few(nbytes):
            self._tensors.append((tensor, tensor.detach().clone(), version_of(tensor)))

    def _note_array(self, value: Any) -> None:
        is_array = type(value) is numpy.ndarray
        if not self._are_few(value.nbytes if is_array else memoryview(value).nbytes):
            raise _Unknown
        self._arrays.append((value, value.copy() if is_array else value[:]))

    def _are_few(self, nbytes: int) -> bool:
        few = nbytes <= min(LARGEST_BYTES, self._left_bytes)
        self._left_bytes -= few * nbytes
        return few


def _replaced(held: Any, in_place: Mapping[int, Any]) -> Any:
    if isinstance(held, dict):
        return {key: in_place.get(id(one), one) for key, one in held.items()}
    return held if isinstance(held, set) else [in_place.get(id(one), one) for one in held]


@by_class
def _is_plain_subclass(kind: type) -> bool:
    """Whether a class is of lists, mappings or sets and changes nothing of how these are read and written."""
    base = next((base for base in (dict, list, set) if issubclass(kind, base)), None)
    names = vars(base).keys() - _OF_ANY if base is not None and is_own_class(kind) else ()
    return bool(names) and all(getattr(kind, name) is getattr(base, name) for name in names)


def _refill(value: Any, held: Any) -> None:
    if isinstance(held, set):
        value.difference_update(value - held)
        value.update(held)
    elif isinstance(held, dict):
        give_back(value, held)
    elif list(map(id, value)) != list(map(id, held)):
        if isinstance(value, list):
            value[:] = held
        else:
            value.clear()
            value.extend(held)


def _differs(value: Any, held: Any) -> bool:
    if isinstance(held, dict):
        return any(value.get(key, ABSENT) is not one for key, one in held.items()) or any(
            stays_away(value, key, held.get(key, ABSENT)) for key in list(value))
    return bool(value != held) if isinstance(held, set) else list(map(id, value)) != list(map(id, held))


def _bytes_of(numbers: Any) -> bytes:
    return bytes(numbers.tobytes()) if isinstance(numbers, (numpy.ndarray, array.array)) else bytes(numbers)


def stays_away(now: Mapping[Any, Any], key: Any, then: Any) -> bool:
    """Whether a key that a mapping did not have (``then`` is ``ABSENT``) is to be taken from it again."""
    if then is not ABSENT:
        return False
    one = now.get(key, ABSENT)
    return one is not ABSENT and (not isinstance(one, _STAYING) or _holds_results(one))


def _holds_results(function: Any) -> bool:
    """Whether a function was made around what may have been computed."""
    cells = function.__closure__ or () if type(function) is FunctionType else ()
    with suppress(ValueError):  # an empty cell
        return any(not isinstance(cell.cell_contents, _STAYING) for cell in cells)
    return True


def give_back(now: dict[Any, Any], then: dict[Any, Any]) -> None:
    """Key by key, so that nobody finds a mapping empty meanwhile; in the order in which they were."""
    for key in [key for key in list(now) if stays_away(now, key, then.get(key, ABSENT))]:
        del now[key]
    kept = [key for key in list(now) if key in then]
    in_order = kept == [key for key in then if key in now]
    for key, one in then.items():
        if not in_order or now.get(key, ABSENT) is not one:
            if not in_order:
                now.pop(key, None)
            now[key] = one


def _read(slot: MemberDescriptorType, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # nothing was put into it
        return ABSENT
