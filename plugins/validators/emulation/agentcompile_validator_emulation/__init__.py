"""Runs CUDA kernels on the CPU: a backend without a GPU, and a validator that finds races, bounds and barrier errors."""

from collections.abc import Iterable

from agentcompile_core.plugin_api import Backend, Validator, hookimpl


@hookimpl
def agentcompile_backends() -> Iterable[Backend]:
    """The backend ``emulation``."""
    from .backend import EmulationBackend

    return [EmulationBackend()]


@hookimpl
def agentcompile_validators() -> Iterable[Validator]:
    """The validator ``emulation``."""
    from .validator import EmulationValidator

    return [EmulationValidator()]
