"""Numerics validator: agreement with the fp64 reference within the error budget, and integrity of memory."""

from collections.abc import Iterable

from agentcompile_core.plugin_api import Validator, hookimpl

from .validator import NumericsValidator

__all__ = ["NumericsValidator", "agentcompile_validators"]


@hookimpl
def agentcompile_validators() -> Iterable[Validator]:
    """Offer the validator that every configuration names by default."""
    return (NumericsValidator(),)
