"""What lies in lists, sets, mappings and objects that the parts of a module hold: a forward reads it as it reads their plain attributes."""

import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from attrs import define, field

if TYPE_CHECKING:
    import torch

HOLDS = "holds something else"
MOST = 10_000  # items of one module that are looked at; a container that has more than are left of them is not
_CONTAINERS = (list, dict, set, deque)
_LIBRARIES = ("torch", "transformers", "numpy", "agentcompile_core")  # whose objects are not looked into
_LEFT_BY_LOADING = ("generation_config", "all_tied_weights_keys", "warnings_issued", "hf_device_map", "hf_quantizer")


class Items(tuple[Any, ...]):
    """What a container or an object holds: elements, or names and then values."""

    __slots__ = ()


class Held:
    """One container or object, by how it is reached from the part that holds it."""

    def __init__(self, reach: Callable[[], Any]) -> None:
        self._reach, self._items = reach, Items()

    def get(self, name: str = "") -> Any:
        """Its ``Items`` now; the same tuple as before where each of them is the same object. ``name`` is not read."""
        found = _items(self._reach())
        if len(found) != len(self._items) or not all(map(operator.is_, found, self._items)):
            self._items = found
        return self._items


def held_by(module: "torch.nn.Module") -> Iterator[tuple[Held, str]]:
    """All that the parts of ``module`` hold, with what each is called; what lies within another one, too, but nothing twice.

    Left out are what torch's and transformers' own classes keep for themselves, and objects of libraries.
    """
    walk = _Walk()
    for path, part in module.named_modules():
        for name, value in list(part.__dict__.items()):
            if is_the_parts_own(part, name):
                yield from walk.of(value, f"{path}.{name}" if path else name, partial(part.__dict__.get, name))


@define
class _Walk:
    seen: dict[int, Any] = field(factory=dict)  # containers and objects by ``id``, held so that no address is used again
    left: int = MOST

    def of(self, value: Any, path: str, reach: Callable[[], Any]) -> Iterator[tuple[Held, str]]:
        waiting = [(value, path, reach)]
        while waiting:
            value, path, reach = waiting.pop()
            if id(value) in self.seen or not holds(value):
                continue
            self.seen[id(value)] = value
            within = _named(value)
            if len(within) >= self.left:
                continue
            self.left -= 1 + len(within)
            if not isinstance(value, tuple):  # of a tuple, only what lies in it can change
                yield Held(reach), path
            waiting += [(one, f"{path}{key}", partial(_itself, one)) for key, one in reversed(within)]


def _itself(value: Any) -> Any:
    return value


@cache
def _tables() -> frozenset[str]:
    """What every module of torch has."""
    from torch import nn

    return frozenset(vars(nn.Module()))


def is_the_parts_own(part: "torch.nn.Module", name: str) -> bool:
    """Whether what ``part`` holds under ``name`` may be read by its forward: not the tables of every module, nor notes of libraries."""
    if name in _tables() or name in _LEFT_BY_LOADING:
        return False
    if not name.startswith("_"):
        return True
    loaded = sys.modules.get("transformers.modeling_utils")
    return not type(part).__module__.startswith("torch.") and not (loaded is not None and hasattr(loaded.PreTrainedModel, name))


def holds(value: Any) -> bool:
    """Whether it is looked into."""
    import torch

    if isinstance(value, (*_CONTAINERS, tuple)):
        return not isinstance(value, torch.Size)
    if isinstance(value, (torch.nn.Module, torch.Tensor, type, FunctionType, MethodType, ModuleType)) or _is_configuration(value):
        return False
    kind = type(value)
    root = kind.__module__.partition(".")[0]
    return isinstance(value, SimpleNamespace) or bool(root not in (*sys.stdlib_module_names, *_LIBRARIES) and _attributes(value))


def _is_configuration(value: Any) -> bool:
    """Those of transformers, which are looked at by themselves."""
    return hasattr(value, "model_type") and hasattr(value, "to_dict")


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", None) or {})
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _items(value: Any) -> Items:
    if isinstance(value, dict):
        return Items((*value.keys(), *value.values()))
    if isinstance(value, (list, tuple, set, deque)):
        return Items(value)
    found = _attributes(value)
    return Items((*found.keys(), *found.values()))


def _named(value: Any) -> list[tuple[str, Any]]:
    """What lies in it, with what its path goes on by."""
    if isinstance(value, dict):
        return [(f"[{key!r}]", one) for key, one in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [(f"[{at}]", one) for at, one in enumerate(value)]
    return [] if isinstance(value, set) else [(f".{name}", one) for name, one in _attributes(value).items()]
