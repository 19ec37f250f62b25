"""Backend ``cuda``: builds with NVRTC or nvcc, launches through the driver, times with CUDA events; validator ``sanitizer``."""

from collections.abc import Iterable

from agentcompile_core.plugin_api import Backend, Target, Validator, hookimpl


@hookimpl
def agentcompile_backends() -> Iterable[Backend]:
    """The CUDA backend. Nothing of CUDA is imported before it is used."""
    from .backend import CudaBackend

    return [CudaBackend()]


@hookimpl
def agentcompile_targets() -> Iterable[Target]:
    """The NVIDIA GPUs that are known by name."""
    from agentcompile_cuda_kit.targets import PRESETS

    return PRESETS.values()


@hookimpl
def agentcompile_validators() -> Iterable[Validator]:
    """compute-sanitizer, for winners where the user asks for it."""
    from .sanitizer.validator import SanitizerValidator

    return [SanitizerValidator()]
