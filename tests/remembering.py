"""Modules that keep what they computed, in one place each where no attribute leads to."""

import collections
import contextvars
import ctypes
import functools
import importlib
import sys
import types
import weakref
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn

from agentcompile_core import api
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.store import Store

CATALOG = load_catalog(only=())
X, Y = torch.linspace(-2.0, 2.0, 12).reshape(3, 4), torch.linspace(3.0, 9.0, 12).reshape(3, 4)
Make = Callable[[torch.Tensor], torch.Tensor]
NUMBER: torch.Tensor | None = None
TABLE: dict[str, torch.Tensor] = {}
LAST: list[torch.Tensor] = []
STATE = types.ModuleType("state_of_a_test")


class Module(nn.Module):
    """Subtracts what ``kept`` gives for its argument."""

    def __init__(self, kept: Make) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.kept(x)


def in_a_closure(make: Make) -> Make:
    memo: list[torch.Tensor] = []

    def kept(x: torch.Tensor) -> torch.Tensor:
        if not memo:
            memo.append(make(x))
        return memo[0]

    return kept


def in_a_name_of_a_closure(make: Make) -> Make:
    memo: torch.Tensor | None = None

    def kept(x: torch.Tensor) -> torch.Tensor:
        nonlocal memo
        if memo is None:
            memo = make(x)
        return memo

    return kept


def in_an_empty_cell(make: Make) -> Make:
    def kept(x: torch.Tensor) -> torch.Tensor:
        nonlocal memo
        try:
            return memo
        except NameError:
            memo = make(x)
            return memo

    if make is None:
        memo = torch.zeros(())
    return kept


def in_a_global(make: Make) -> Make:
    def kept(x: torch.Tensor) -> torch.Tensor:
        global NUMBER
        if NUMBER is None:
            NUMBER = make(x)
        return NUMBER

    return kept


def in_a_global_mapping(make: Make) -> Make:
    def kept(x: torch.Tensor) -> torch.Tensor:
        if "memo" not in TABLE:
            TABLE["memo"] = make(x)
        return TABLE["memo"]

    return kept


def in_another_python_module(make: Make) -> Make:
    def kept(x: torch.Tensor) -> torch.Tensor:
        if not hasattr(STATE, "memo"):
            STATE.memo = make(x)  # type: ignore[attr-defined]
        found: torch.Tensor = STATE.memo
        return found

    return kept


def in_a_class(make: Make) -> Make:
    class Shared:
        memo: torch.Tensor | None = None

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            if Shared.memo is None:
                Shared.memo = make(x)
            return Shared.memo

    return Shared()


def as_a_new_name_of_a_class(make: Make) -> Make:
    class Shared:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            if "memo" not in vars(Shared):
                Shared.memo = make(x)  # type: ignore[attr-defined]
            found: torch.Tensor = Shared.memo  # type: ignore[attr-defined]
            return found

    return Shared()


def in_a_default(make: Make) -> Make:
    def kept(x: torch.Tensor, memo: list[torch.Tensor] = []) -> torch.Tensor:  # noqa: B006 - this is what is tested
        if not memo:
            memo.append(make(x))
        return memo[0]

    return kept


def in_a_function(make: Make) -> Make:
    def kept(x: torch.Tensor) -> torch.Tensor:
        if not hasattr(kept, "memo"):
            kept.memo = make(x)  # type: ignore[attr-defined]
        found: torch.Tensor = kept.memo  # type: ignore[attr-defined]
        return found

    return kept


def in_a_cache(make: Make) -> Make:
    @functools.lru_cache
    def first() -> torch.Tensor:
        return make(LAST[0])

    def kept(x: torch.Tensor) -> torch.Tensor:
        LAST[:] = [x.detach().clone()]
        return first()

    return kept


def in_a_mapping(mapping: Any) -> Callable[[Make], Make]:
    def of(make: Make) -> Make:
        def kept(x: torch.Tensor) -> torch.Tensor:
            if Module not in mapping:
                mapping[Module] = make(x)
            found: torch.Tensor = mapping[Module]
            return found

        return kept

    return of


class Noted(dict):  # type: ignore[type-arg]
    """A mapping with a method of its own."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)


PLACES: dict[str, Any] = {made.__name__: made for made in (
    in_a_closure, in_a_name_of_a_closure, in_an_empty_cell, in_a_global, in_a_global_mapping, in_another_python_module, in_a_class,
    as_a_new_name_of_a_class, in_a_default, in_a_function, in_a_cache)}
PLACES |= {kind.__name__: lambda make, kind=kind: in_a_mapping(kind())(make)
           for kind in (dict, collections.UserDict, collections.ChainMap, collections.Counter, collections.OrderedDict)}
CLOSED: dict[str, Callable[[], Any]] = {"a mapping of one's own": Noted, "a mapping of weak keys": weakref.WeakKeyDictionary}


VARIABLE: contextvars.ContextVar[torch.Tensor] = contextvars.ContextVar("VARIABLE")
BOX = ctypes.py_object()


def in_a_context_variable(make: Make) -> Make:
    def kept(x: torch.Tensor) -> torch.Tensor:
        if VARIABLE.get(None) is None:
            VARIABLE.set(make(x))
        return VARIABLE.get()

    return kept


def in_a_global_by_text(make: Make) -> Make:
    def kept(x: torch.Tensor) -> torch.Tensor:
        if "BY_TEXT" not in globals():
            globals()["BY_TEXT"] = make(x)
        found: torch.Tensor = globals()["BY_TEXT"]
        return found

    return kept


def as_a_name_of_a_library(make: Make) -> Make:
    def kept(x: torch.Tensor) -> torch.Tensor:
        if not hasattr(torch.nn.functional, "memo_of_a_test"):
            torch.nn.functional.memo_of_a_test = make(x)  # type: ignore[attr-defined]
        found: torch.Tensor = torch.nn.functional.memo_of_a_test  # type: ignore[attr-defined]
        return found

    return kept


def in_a_box_of_c(make: Make) -> Make:
    def kept(x: torch.Tensor) -> torch.Tensor:
        if not BOX:
            BOX.value = make(x)
        found: torch.Tensor = BOX.value
        return found

    return kept


def in_a_python_module_found_by_text(make: Make) -> Make:
    def kept(x: torch.Tensor) -> torch.Tensor:
        state = importlib.import_module("state_of_a_test")
        if not hasattr(state, "memo"):
            state.memo = make(x)
        found: torch.Tensor = state.memo
        return found

    return kept


def in_a_generator(make: Make) -> Make:
    def first() -> Generator[torch.Tensor, torch.Tensor, None]:
        x = yield torch.zeros(())
        memo = make(x)
        while True:
            yield memo

    started = first()
    next(started)
    return started.send


UNSEEN: dict[str, Any] = {made.__name__: made for made in (
    in_a_context_variable, in_a_global_by_text, as_a_name_of_a_library, in_a_box_of_c, in_a_python_module_found_by_text, in_a_generator)}


def emptied() -> None:
    """Nothing is kept in a place that outlives its module."""
    global NUMBER, BOX
    NUMBER, BOX = None, ctypes.py_object()
    globals().pop("BY_TEXT", None)
    vars(torch.nn.functional).pop("memo_of_a_test", None)
    if VARIABLE.get(None) is not None:
        VARIABLE.set(None)  # type: ignore[arg-type]
    TABLE.clear()
    LAST.clear()
    sys.modules[STATE.__name__] = STATE
    vars(STATE).pop("memo", None)


def compiled(module: nn.Module) -> Any:
    """``module``, compiled on ``X``."""
    return api.compile(module, device="cpu", store=Store(None), catalog=CATALOG, example_inputs=(X,))
