"""What lists, mappings, sets and objects hold that parts of a module lead to; given back to them behind a trial or a trace."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from ...runtime.held import is_own_object, is_plain_namespace

MOST = 20_000  # lists, mappings, sets and objects of one model
MOST_BYTES = 1 << 30  # of tensors in them whose numbers are kept
_CACHES = "transformers.cache_utils"  # objects of a library that forwards fill
# What was put into a mapping meanwhile and stays there, such as an imported module in ``sys.modules``: nothing that a forward computes.
_STAYING = (ModuleType, type, FunctionType, BuiltinFunctionType, MethodType)
_ABSENT = object()


@define
class Holders:
    """What was noted of containers, objects and tensors; ``put_back`` gives it to them again, where it is another one by now."""

    _containers: list[tuple[Any, Any]] = field(factory=list)
    _objects: list[tuple[Any, dict[str, Any] | None, dict[MemberDescriptorType, Any]]] = field(factory=list)
    _tensors: list[tuple[Tensor, Tensor]] = field(factory=list)
    _seen: dict[int, Any] = field(factory=dict)  # by address, which is theirs as long as they are here
    _left: int = MOST
    _left_bytes: int = MOST_BYTES

    def look_at(self, values: Iterable[Any], known: Iterable[Any] = ()) -> None:
        """Note what can be reached from ``values``, but for what is ``known``: parts, parameters and buffers, which others look after."""
        self._seen |= {id(one): one for one in known}
        left = deque(values)
        while left:
            value = left.popleft()  # what is near first, where there is too much
            if id(value) not in self._seen and self._left > 0:
                with suppress(Exception):  # whatever somebody's class raises where it is looked at
                    left += self._noted(value)

    def put_back(self) -> None:
        """Containers and objects hold what they held, and tensors the same numbers."""
        for value, held in self._containers:
            with suppress(Exception):
                _refill(value, held)
        for value, attributes, slots in self._objects:
            with suppress(Exception):
                if attributes is not None:
                    _refill(value.__dict__, attributes)
                for slot, one in slots.items():
                    if _read(slot, value) is not one:
                        slot.__delete__(value) if one is _ABSENT else slot.__set__(value, one)
        with torch.no_grad():
            for tensor, numbers in self._tensors:
                if tensor.shape == numbers.shape and not torch.equal(tensor, numbers):
                    tensor.copy_(numbers)

    def _noted(self, value: Any) -> list[Any]:
        """What lies in ``value``, which is noted."""
        if isinstance(value, Tensor):
            self._note_numbers(value)
            return []
        if isinstance(value, (list, deque, set, dict)):
            held = dict(value.items()) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)
            self._note(value)
            self._containers.append((value, held))
            return list(held.values() if isinstance(held, dict) else held)
        if isinstance(value, (tuple, frozenset)):
            self._note(value)
            return list(value)
        if isinstance(value, partial):
            self._note(value)
            return [value.func, value.args, value.keywords]
        if isinstance(value, nn.Module) or is_plain_namespace(value) or is_own_object(value) or type(value).__module__ == _CACHES:
            self._note(value)
            attributes = dict(value.__dict__) if hasattr(value, "__dict__") else None
            slots = {slot: _read(slot, value) for slot in _slots_of(type(value))}
            self._objects.append((value, attributes, slots))
            return [*(attributes or {}).values(), *slots.values()]
        return []

    def _note(self, value: Any) -> None:
        self._seen[id(value)] = value
        self._left -= 1

    def _note_numbers(self, tensor: Tensor) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta and nbytes <= self._left_bytes:
            self._left_bytes -= nbytes
            self._note(tensor)
            self._tensors.append((tensor, tensor.detach().clone()))


def _refill(value: Any, held: Any) -> None:
    if isinstance(value, set):
        if value != held:
            value.clear()
            value.update(held)
    elif isinstance(value, dict):
        now = dict(value.items())
        if _is_same(now.keys(), held.keys()) and _is_same(now.values(), held.values()):
            return
        staying = {key: one for key, one in now.items() if key not in held and isinstance(one, _STAYING)}
        value.clear()
        value.update({**held, **staying})
    elif not _is_same(value, held):
        value.clear()
        value.extend(held)


def _is_same(now: Iterable[Any], then: Iterable[Any]) -> bool:
    return list(map(id, now)) == list(map(id, then))


def _slots_of(kind: type) -> Iterator[MemberDescriptorType]:
    for one in kind.__mro__:
        yield from (slot for slot in vars(one).values() if isinstance(slot, MemberDescriptorType))


def _read(slot: MemberDescriptorType, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # nothing was put into it
        return _ABSENT
