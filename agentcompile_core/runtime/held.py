"""What lies in lists, mappings, sets and objects that parts of a module hold: a forward reads it as it reads their plain attributes.

Of parts of one's own classes and of torch's layers: those of other packages keep notes, caches and settings there that change in use.
"""

import enum
import pathlib
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, frozen

from .absent import class_values
from .by_class import by_class
from .installed_packages import is_own_class
from .unregistered import Same, is_module, is_of_all, is_small, is_tensor, number_of, parts_of, registered_by

if TYPE_CHECKING:
    import torch

HOLDS = "holds something else"
MOST = 2_000  # plain values and containers of one attribute; one that has more is not looked at, which takes time at every request
DEEPEST = 30
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_BY_EQUALITY = (enum.Enum, pathlib.PurePath, range, slice, FunctionType, BuiltinFunctionType, MethodType, type)
_SEQUENCES, _SETS, _NAMESPACES = (list, tuple, deque), (set, frozenset), (SimpleNamespace, Namespace)
_LEFT_BY_LOADING = ("generation_config", "all_tied_weights_keys", "warnings_issued", "hf_device_map", "hf_quantizer")
_OPAQUE = "something that is not looked into"
_UNREADABLE = ("unreadable",)


class _TooMuch(Exception):
    """More than ``MOST``, or too deep."""


@frozen(eq=False)
class Held:
    """What one attribute holds: ``path`` is what it is called, ``reach`` gives it, ``form`` is what it was.

    ``registered``: addresses of what the module registers. ``tensors``: those in it that a graph may hold as numbers; ``read`` of them are
    to stay where they are: those that the forward reads and does not exchange. ``within``: those of modules in it. Numbers of ``unread``
    ones do not count.
    """

    path: str
    reach: Callable[[], Any]
    form: Any
    registered: frozenset[int] = frozenset()
    tensors: "tuple[torch.Tensor, ...]" = ()
    read: frozenset[int] = frozenset()  # by address
    within: "tuple[torch.Tensor, ...]" = ()
    unread: frozenset[int] = frozenset()

    def known_to_read(self, read: frozenset[int], stay: frozenset[int], unread: frozenset[int]) -> "Held":
        """The same where it is known which tensors the forward reads, leaves where they are, and does not read; its form as it is now."""
        found = evolve(self, read=read & stay & frozenset(map(id, self.tensors)), unread=unread)
        return evolve(found, form=found.now())

    def there(self) -> frozenset[int]:
        """Addresses of the tensors in it that are not registered; of what cannot be looked at any more, all that were."""
        forms = _Forms(self.registered)
        try:
            forms.of(self.reach())
        except Exception:  # whatever somebody's class raises where it is looked at
            return frozenset(map(id, self.tensors))
        return frozenset(forms.met)

    def changed(self) -> bool:
        """Whether plain values in it are others by now, or there are more or fewer."""
        return not keeps(self.now(), self.form)

    def now(self) -> Any:
        """Its form now, for ``keeps``; what cannot be looked at any more has one of its own."""
        try:
            forms, value = _Forms(self.registered, self.unread), self.reach()
            if is_tensor(value):  # that it is another one is looked at where other attributes are
                return forms.number(value)
            return (forms.of(value), tuple(map(forms.number, self.tensors)), tuple(at for at in forms.met if at in self.read))
        except Exception:  # whatever somebody's class raises where it is looked at
            return _UNREADABLE


def keeps(now: Any, then: Any) -> bool:
    """Whether a form has what another one had, and no more but in memos: those may have grown."""
    try:
        return bool(now == then) or _has_grown(now, then)
    except Exception:  # whatever a class raises that is compared
        return False


def _has_grown(now: Any, then: Any) -> bool:
    """As ``keeps``, item by item: for what is not equal."""
    if type(now) is _Memo and (type(then) is _Memo or then == ()):
        before = then.items if type(then) is _Memo else ()
        return len(now.items) >= len(before) and all(map(_has_grown, now.items, before))
    if type(now) is tuple and type(then) is tuple:
        return len(now) == len(then) and all(map(_has_grown, now, then))
    return type(now) is type(then) and bool(now == then)


def held_by(module: "torch.nn.Module") -> Iterator[Held]:
    """All that parts of ``module`` of one's own classes hold and that can be looked at."""
    registered = registered_by(module)
    for path, part in module.named_modules():
        for name, value in list(part.__dict__.items()):
            with suppress(Exception):  # what raises where it is looked at is not
                if _may_be_read(part, name) and _has_parts(value):
                    if is_tensor(value) and (id(value) in registered or not number_of(value)):
                        continue
                    forms = _Forms(registered)
                    forms.of(value)
                    found = Held(f"{path}.{name}" if path else name, partial(part.__dict__.get, name), None, registered,
                                 tuple(tensor for tensor in forms.met.values() if number_of(tensor)), within=tuple(forms.within))
                    yield evolve(found, form=found.now())


def _may_be_read(part: "torch.nn.Module", name: str) -> bool:
    """Whether a forward of one's own may read it: it is no note of torch or transformers, and no part of another package holds it."""
    if is_of_all(name) or name in _LEFT_BY_LOADING:
        return False
    if not _is_own_class(type(part)):  # what was put into a layer of torch's
        return type(part).__module__.startswith("torch.nn.") and not name.startswith("_")
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is None or not isinstance(part, loaded.PreTrainedModel) or not hasattr(loaded.PreTrainedModel, name)


def _has_parts(value: Any) -> bool:
    return isinstance(value, (dict, *_SEQUENCES, *_SETS, *_NAMESPACES)) or is_tensor(value) or is_module(value) or is_own_object(value)


def is_plain_namespace(value: Any) -> bool:
    """Whether it is an object of the standard library that holds whatever is put into it."""
    return isinstance(value, _NAMESPACES)


def is_own_object(value: Any) -> bool:
    """Whether it is an object of one's own class, but no module, tensor, class, function or configuration of transformers."""
    kind = type(value)
    if not _is_own_class(kind):
        return False
    loaded = sys.modules.get("transformers.configuration_utils")
    configured = loaded is not None and issubclass(kind, loaded.PreTrainedConfig)  # these are looked at by themselves
    return not configured and not is_module(value) and not is_tensor(value) and not issubclass(kind, (type, *_BY_EQUALITY))


_is_own_class = by_class(is_own_class)


@by_class
def _class_names(kind: type) -> tuple[str, ...]:
    """Plain values that a class of one's own gives to all its objects."""
    return tuple(class_values(kind))


@by_class
def _cached_names(kind: type) -> frozenset[str]:
    """The attributes that cached properties of a class make when they are read first."""
    found = {name: one for parent in reversed(kind.__mro__) for name, one in vars(parent).items()}
    return frozenset(name for name, one in found.items() if isinstance(one, cached_property))


@define
class _Forms:
    """Values as tuples that compare by what a forward reads. What is no plain value, container or object of one's own is opaque, and has no
    part in the form of what it lies in; nor have tensors that are not registered, which a forward may exchange there, but ``met`` are those
    that were, and ``within`` those of modules."""

    registered: frozenset[int]
    unread: frozenset[int] = frozenset()
    met: "dict[int, torch.Tensor]" = field(factory=dict)  # by address
    within: "list[torch.Tensor]" = field(factory=list)
    done: dict[int, int] = field(factory=dict)  # modules that are not registered, by address: which one of them it was
    left: int = MOST
    open: list[int] = field(factory=list)  # of what one is within

    def of(self, value: Any) -> Any:
        kind = type(value)
        self.left -= 1
        if kind in _SCALARS:
            return (kind, value if value == value else "NaN")
        if id(value) in self.open:
            return ("within", self.open.index(id(value)))
        if self.left < 0 or len(self.open) > DEEPEST:
            raise _TooMuch
        if isinstance(value, _BY_EQUALITY) or (kind.__module__ == "torch" and kind.__name__ in ("dtype", "device")):
            return value
        if is_tensor(value):
            return self._met(value)
        if is_module(value):
            return self._module(value) if id(value) in self.registered or is_small(value) else _OPAQUE
        if isinstance(value, partial):
            return (kind, self._within(value, lambda: (self.of(value.func), self.of(value.args), self.of(value.keywords))))
        if isinstance(value, dict):
            return (kind, self._within(value, lambda: self._mapping(value)))
        if isinstance(value, _SEQUENCES):
            return (kind, self._within(value, lambda: tuple(filter(_is_seen, map(self.of, value)))))
        if isinstance(value, _SETS):
            return (kind, self._within(value, lambda: frozenset(filter(_is_seen, map(self.of, value)))))
        if isinstance(value, _NAMESPACES) or is_own_object(value):
            return (kind, self._within(value, lambda: self._object(value)))
        return _OPAQUE

    def _object(self, value: Any) -> Any:
        """Its attributes, and those that cached properties have made, which may become more."""
        attributes, cached = _attributes(value), _cached_names(type(value))
        made = [(name, form) for name in attributes if name in cached and _is_seen(form := self.of(attributes[name]))]
        of_class = tuple((name, self.of(getattr(type(value), name))) for name in _class_names(type(value)))
        plain = self._mapping({name: one for name, one in attributes.items() if name not in cached})
        return (plain, _Memo(tuple(made)) if made else (), of_class)

    def _mapping(self, value: dict[Any, Any]) -> Any:
        """Of one without a name for a key, which a forward may fill as it meets new lengths, what is there now is looked for later."""
        items = tuple((self.of(key), form) for key, one in dict.items(value) if _is_seen(form := self.of(one)))
        return items if any(type(key) is str for key in value) or not items else _Memo(items)

    def _met(self, tensor: "torch.Tensor") -> Any:
        if id(tensor) in self.registered:
            return Same(tensor)
        self.met[id(tensor)] = tensor
        return _OPAQUE

    def number(self, tensor: "torch.Tensor") -> tuple[Any, ...]:
        return () if id(tensor) in self.unread else number_of(tensor)

    def _module(self, module: "torch.nn.Module") -> Any:
        """One that is registered is watched elsewhere. At another one nothing else looks; its tensors count by their numbers, as a graph
        holds them."""
        if id(module) in self.registered:
            return Same(module)
        if id(module) in self.done:
            return ("again", self.done[id(module)])
        self.done[id(module)] = len(self.done)
        return (type(module), self._within(module, lambda: tuple((name, self._part(one)) for name, one in self._parts_of(module))))

    def _parts_of(self, module: "torch.nn.Module") -> Iterator[tuple[str, Any]]:
        yield from parts_of(module)
        yield from ((name, one) for name, one in vars(module).items() if not is_of_all(name) and
                    (type(one) in _SCALARS or isinstance(one, _BY_EQUALITY) or _may_be_read(module, name)))

    def _part(self, value: Any) -> Any:
        if is_tensor(value):
            if id(value) in self.registered:
                return Same(value)
            self.within.append(value)
            return self.number(value)
        if type(value) is Same:
            return value
        return self._module(value) if is_module(value) and id(value) not in self.open else self.of(value)

    def _within(self, value: Any, made: Callable[[], Any]) -> Any:
        self.open.append(id(value))
        try:
            return made()
        finally:
            self.open.pop()


def _is_seen(form: Any) -> bool:
    return form is not _OPAQUE


@define
class _Memo:
    """Items of a mapping that may grow; ``keeps`` says which may stand in the place of which.

    It has no hash, so that none is in a set, whose elements are compared as they are.
    """

    items: tuple[Any, ...]


def member_slots(kind: type) -> Iterator[tuple[str, MemberDescriptorType]]:
    """The slots of a class and its bases, by names that no two of them share."""
    for one in kind.__mro__:
        yield from ((f"{one.__name__}.{name}", slot) for name, slot in vars(one).items() if isinstance(slot, MemberDescriptorType))


def _attributes(value: Any) -> dict[str, Any]:
    """Those that lie in the object itself; no property and no ``__getattr__`` is asked."""
    found: dict[str, Any] = {}
    with suppress(AttributeError):  # an object of slots alone
        found |= object.__getattribute__(value, "__dict__")
    for name, slot in member_slots(type(value)):
        with suppress(AttributeError):  # a slot that nothing was put into
            found[name] = slot.__get__(value)
    return found
