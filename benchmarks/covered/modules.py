"""Every plain module of the sweep, by name."""

from . import modules_calls as modules_calls
from . import modules_models as modules_models
from . import modules_simple as modules_simple
from .case import CASES, Case

__all__ = ["CASES", "Case"]
