"""Other functions in the places from which the code of a model calls them, while it is traced."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn


def modules_of(model: nn.Module) -> list[ModuleType]:
    """The Python modules that hold the classes of ``model`` and its parts."""
    names = dict.fromkeys(type(part).__module__ for part in model.modules())
    return [sys.modules[name] for name in names if name in sys.modules]


@contextmanager
def replaced(places: Sequence[tuple[ModuleType, str, Any]]) -> Iterator[None]:
    """A block in which each module holds another value under a name."""
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    try:
        for module, name, value in places:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
