"""Implementations ``norm``, ``rope`` and ``activation``: kernels written by hand in Triton."""

from collections.abc import Iterable

from agentcompile_core.plugin_api import Implementation, hookimpl

from .activation import TritonActivation
from .norm import TritonNorm
from .rope import TritonRope

__all__ = ["TritonActivation", "TritonNorm", "TritonRope"]


@hookimpl
def agentcompile_implementations() -> Iterable[Implementation]:
    """Offer all three."""
    return (TritonNorm(), TritonRope(), TritonActivation())
