"""Runtime ``cudagraph`` (role decode): a program run once under capture, then replayed."""

from collections.abc import Iterable

from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.plugin.interfaces import RuntimeIntegration

from .runtime import CudaGraphRuntime, GraphStep

__all__ = ["CudaGraphRuntime", "GraphStep"]


@hookimpl
def agentcompile_runtimes() -> Iterable[RuntimeIntegration]:
    """Offer ``cudagraph``."""
    return (CudaGraphRuntime(),)
