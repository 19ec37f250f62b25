"""Triangular systems, which some models write out row by row for whoever exports them: a graph of ours holds one operator."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

from torch import nn

from .replaced import modules_of, replaced

ASKED, SOLVER = "is_torchdynamo_exporting", "solve_triangular"


@contextmanager
def triangles_solved(model: nn.Module) -> Iterator[None]:
    """A block in which the code of ``model`` is told that nobody exports it, where it asks before it solves a triangular system.

    Gated delta rules (Qwen3-Next, Qwen3.5, OLMo-Hybrid) write out some 700 operators a layer else, in place of one.
    """
    with replaced([(module, ASKED, _nobody_exports) for module in modules_of(model) if _asks(module)]):
        yield


def _nobody_exports() -> bool:
    return False


@cache
def _asks(module: ModuleType) -> bool:
    """Whether code of ``module`` solves triangular systems unless it is exported."""
    if not callable(getattr(module, ASKED, None)):
        return False
    try:
        return f".{SOLVER}(" in inspect.getsource(module)
    except (OSError, TypeError):  # without a source nobody knows
        return False
