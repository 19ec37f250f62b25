"""State that the code of a module keeps where none of its attributes leads to: in closures, globals, classes, functions and caches.

Given back behind a trial like what attributes lead to (``Holders``), all of it or nothing. Whether anything is left that could not be given
back, the identity of the module tells (``changed_by_trials``).
"""

import functools
from collections.abc import Iterable
from types import CellType, FunctionType
from typing import Any

from attrs import define, field
from torch import nn
from transformers import PreTrainedModel

from ...plugin.interfaces import LoadedModel
from . import libraries
from .code_digest import names_of
from .holders import ABSENT, Holders, stays_away
from .identity import Identity, digested, identity

# Of classes: what Python keeps there itself, and what cannot be set.
_OF_PYTHON = frozenset({"__dict__", "__weakref__", "__abstractmethods__", "_abc_impl", "__annotations_cache__", "__annotate_func__"})


@define
class CodeState:
    """What was noted of the code of one module; ``put_back`` gives it back where it is another one by now."""

    _cells: list[tuple[CellType, Any]] = field(factory=list)
    _names: list[tuple[dict[str, Any], dict[str, Any]]] = field(factory=list)  # of globals: what stood under the names that code uses
    _classes: list[tuple[type, dict[str, Any]]] = field(factory=list)
    _caches: list[Any] = field(factory=list)  # empty ones
    _holders: Holders = field(factory=Holders)

    def put_back(self) -> None:
        """Names mean what they meant, and what they lead to holds what it held."""
        for cell, value in self._cells:
            if _content(cell) is not value:
                if value is ABSENT:
                    del cell.cell_contents
                else:
                    cell.cell_contents = value
        for scope, then in self._names:
            for name in [name for name, value in then.items() if stays_away(scope, name, value)]:
                del scope[name]
            scope.update({name: value for name, value in then.items() if value is not ABSENT and scope.get(name, ABSENT) is not value})
        for cls, held in self._classes:
            for name in [name for name in vars(cls) if name not in _OF_PYTHON and stays_away(vars(cls), name, held.get(name, ABSENT))]:
                type.__delattr__(cls, name)
            for name, value in held.items():
                if vars(cls).get(name, ABSENT) is not value:
                    type.__setattr__(cls, name, value)
        for cache in self._caches:
            if cache.cache_info().currsize:
                cache.cache_clear()
        self._holders.put_back()


def state_of_code(module: nn.Module, known: Iterable[Any] = ()) -> CodeState:
    """What the code of ``module`` keeps now; nothing of a language model of transformers, whose forwards keep nothing there.

    ``known``: what others give back.
    """
    found, roots = CodeState(), []
    if isinstance(module, PreTrainedModel):
        return found
    walk = digested(module)
    for value in walk.met():
        if isinstance(value, FunctionType) and not libraries.is_library_function(value):
            found._cells += [(cell, _content(cell)) for cell in value.__closure__ or ()]
            found._names.append((value.__globals__, _under(value.__globals__, names_of(value.__code__))))
            roots += [vars(value), value.__defaults__, value.__kwdefaults__]
        elif isinstance(value, type) and not libraries.is_library_class(value):
            found._classes.append((value, {name: one for name, one in vars(value).items() if name not in _OF_PYTHON}))
        elif isinstance(value, functools._lru_cache_wrapper) and not value.cache_info().currsize:
            found._caches.append(value)
    found._names += [(vars(used), _under(vars(used), names)) for used, names in walk.modules_met()
                     if not libraries.is_library_module(used.__name__)]
    roots += [one for _, one in found._cells]
    roots += [one for _, held in (*found._names, *found._classes) for one in held.values()]
    return found if found._holders.look_at(roots, known) else CodeState()


def changed_by_trials(loaded: LoadedModel, known: Identity) -> str:
    """One clause where ``loaded`` is not any more what ``known`` says it was before its trials; empty where it is."""
    if identity(loaded).capture == known.capture:
        return ""
    return "its forward fills what outlives a call, and trials left something there; build the module anew before it is called"


def _under(scope: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: scope.get(name, ABSENT) for name in names}


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return ABSENT
