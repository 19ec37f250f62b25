"""Runtime ``cudagraph`` (role decode): a program run once under capture, then replayed."""

from collections.abc import Iterable

from agentcompile_core.plugin_api import RuntimeIntegration, hookimpl

from .runtime import CudaGraphRuntime, GraphStep

__all__ = ["CudaGraphRuntime", "GraphStep"]


@hookimpl
def agentcompile_runtimes() -> Iterable[RuntimeIntegration]:
    """Offer ``cudagraph``."""
    return (CudaGraphRuntime(),)
