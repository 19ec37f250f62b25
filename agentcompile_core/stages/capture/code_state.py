"""State that the code of a module keeps where none of its attributes leads to: in closures, globals, classes, functions and caches."""

import functools
from collections.abc import Iterable
from contextlib import suppress
from types import CellType, FunctionType
from typing import Any

from attrs import define, field
from torch import nn

from . import libraries
from .code_digest import names_of
from .holders import ABSENT, Holders, stays_away
from .identity import digested
from .object_digest import Digests

# Of classes: what Python keeps there itself, and what cannot be set.
_OF_PYTHON = frozenset({"__dict__", "__weakref__", "__abstractmethods__", "_abc_impl", "__annotations_cache__", "__annotate_func__"})
_Cache = functools._lru_cache_wrapper


@define
class CodeState:
    """What was noted of the code of one module, and all that this and its attributes lead to.

    ``opaque``: what cannot be given back, each with the digest that it had.
    """

    module: nn.Module
    opaque: list[tuple[Any, str]] = field(factory=list)
    _cells: list[tuple[CellType, Any]] = field(factory=list)
    _names: list[tuple[dict[str, Any], dict[str, Any]]] = field(factory=list)  # of globals: what stood under the names that code uses
    _classes: list[tuple[type, dict[str, Any]]] = field(factory=list)
    _functions: list[tuple[FunctionType, Any, Any]] = field(factory=list)  # with their defaults
    _caches: dict[int, tuple[Any, Any]] = field(factory=dict)  # by address, each with what it said of itself
    _holders: Holders = field(factory=Holders)

    def changed(self, but_caches: bool = False) -> bool:
        """Whether any of it is another one by now. Of what was absent, Python modules, classes and functions are no change."""
        cells = any(_content(cell) is not value for cell, value in self._cells)
        scopes = any(_differs(scope, then, then) for scope, then in self._names)
        classes = any(_differs(vars(cls), held, vars(cls)) for cls, held in self._classes)
        functions = any(of.__defaults__ is not one or of.__kwdefaults__ is not other for of, one, other in self._functions)
        caches = not but_caches and any(cache.cache_info().misses != then.misses for cache, then in self._caches.values())
        return cells or scopes or classes or functions or caches or self._holders.changed() or bool(self.beyond_return())

    def beyond_return(self) -> str:
        """The type of what is another one by now and cannot be given back; empty: nothing is."""
        if not self.opaque:
            return ""
        walk = digested(self.module)
        return next((type(value).__qualname__ for value, digest in self.opaque if walk.of(value) != digest), "")

    def put_back(self) -> None:
        """Names mean what they meant, and what they lead to holds what it held. Caches stand aside: names of them mean empty ones."""
        self._give_back({at: _emptied(cache) for at, (cache, _) in self._caches.items()})

    def put_back_for_good(self) -> bool:
        """The same, but with the caches themselves; whether these hold again what they held: those that were empty do."""
        self._give_back({})
        for cache, then in self._caches.values():
            if not then.currsize:
                cache.cache_clear()
        return all(not then.currsize or cache.cache_info().misses == then.misses for cache, then in self._caches.values())

    def again(self) -> "CodeState":
        """What stands in the same places now."""
        found = CodeState(self.module)
        found._cells = [(cell, _content(cell)) for cell, _ in self._cells]
        found._names = [(scope, _under(scope, then)) for scope, then in self._names]
        found._classes = [(cls, _of_class(cls)) for cls, _ in self._classes]
        found._functions = [(of, of.__defaults__, of.__kwdefaults__) for of, *_ in self._functions]
        found.note_contents(None)
        return found

    def note_contents(self, walk: Digests | None) -> bool:
        """Note what all of these lead to; whether that is not too much. ``walk`` gives the digests of what is opaque."""
        roots = [one for _, one in self._cells]
        roots += [one for _, held in (*self._names, *self._classes) for one in held.values()]
        roots += [one for of, *defaults in self._functions for one in (vars(of), *defaults)]
        roots += [value for part in self.module.modules() for value in vars(part).values()]
        self._holders = Holders(opaque=[])
        known = (*self.module.modules(), *self.module.parameters(), *self.module.buffers())
        if not self._holders.look_at(roots, known):
            return False
        if walk is not None:
            self.opaque = [(value, walk.of(value)) for value in self._holders.opaque or ()]
        return True

    def _give_back(self, in_place: dict[int, Any]) -> None:
        for cell, value in self._cells:
            value = in_place.get(id(value), value)
            if _content(cell) is not value:
                if value is ABSENT:
                    del cell.cell_contents
                else:
                    cell.cell_contents = value
        for scope, then in self._names:
            for name in [name for name, value in then.items() if stays_away(scope, name, value)]:
                del scope[name]
            wanted = {name: in_place.get(id(value), value) for name, value in then.items() if value is not ABSENT}
            scope.update({name: value for name, value in wanted.items() if scope.get(name, ABSENT) is not value})
        for cls, held in self._classes:
            with suppress(AttributeError, TypeError):  # of a class that cannot be written to
                for name in [name for name in vars(cls) if name not in _OF_PYTHON and stays_away(vars(cls), name, held.get(name, ABSENT))]:
                    type.__delattr__(cls, name)
                for name, value in held.items():
                    value = in_place.get(id(value), value)
                    if vars(cls).get(name, ABSENT) is not value:
                        type.__setattr__(cls, name, value)
        for of, defaults, by_name in self._functions:
            of.__defaults__, of.__kwdefaults__ = defaults, by_name
        self._holders.put_back(in_place)


def state_of_code(module: nn.Module, walk: Digests) -> CodeState | None:
    """What the code of ``module`` keeps now, by a ``walk`` that looked at it just now; None: it is too much to be noted."""
    found = CodeState(module)
    for value in list(walk.met()):
        if type(value) is FunctionType and not libraries.is_library_function(value):
            found._cells += [(cell, _content(cell)) for cell in value.__closure__ or ()]
            found._names.append((value.__globals__, _under(value.__globals__, names_of(value.__code__))))
            found._functions.append((value, value.__defaults__, value.__kwdefaults__))
        elif issubclass(type(value), type) and not libraries.is_library_class(value):
            found._classes.append((value, _of_class(value)))
        elif type(value) is _Cache:
            found._caches[id(value)] = value, value.cache_info()
    found._names += [(vars(used), _under(vars(used), names)) for used, names in walk.modules_met()
                     if not libraries.is_library_module(used.__name__)]
    found._names += [(vars(part), {name: one for name, one in vars(part).items() if type(one) is _Cache}) for part in module.modules()]
    return found if found.note_contents(walk) else None


def _differs(scope: Any, then: dict[str, Any], names: Iterable[str]) -> bool:
    kept = all(scope.get(name, ABSENT) is value for name, value in then.items() if value is not ABSENT)
    return not kept or any(stays_away(scope, name, then.get(name, ABSENT)) for name in names if name not in _OF_PYTHON)


def _of_class(cls: type) -> dict[str, Any]:
    return {name: one for name, one in vars(cls).items() if name not in _OF_PYTHON}


def _under(scope: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: scope.get(name, ABSENT) for name in names}


def _emptied(cache: Any) -> Any:
    made = functools.lru_cache(**cache.cache_parameters())(cache.__wrapped__)
    vars(made).update(vars(cache))
    return made


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return ABSENT
