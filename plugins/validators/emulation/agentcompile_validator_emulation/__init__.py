"""Runs CUDA kernels on the CPU: a backend without a GPU, and a validator that finds races, bounds and barrier errors."""

from collections.abc import Iterable

from agentcompile_core.plugin_api import Backend, Target, Validator, hookimpl


@hookimpl
def agentcompile_backends() -> Iterable[Backend]:
    """The backend ``emulation``."""
    from .backend import EmulationBackend

    return [EmulationBackend()]


@hookimpl
def agentcompile_targets() -> Iterable[Target]:
    """The NVIDIA GPUs that are known by name: what is emulated, where the backend of the real ones is not installed."""
    from agentcompile_cuda_kit.targets import PRESETS

    return PRESETS.values()


@hookimpl
def agentcompile_validators() -> Iterable[Validator]:
    """The validator ``emulation``."""
    from .validator import EmulationValidator

    return [EmulationValidator()]
