"""AgentCompile: a model in, validated CUDA kernels and faster tokens out."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "compile", "load"]

if TYPE_CHECKING:
    from .api import compile, load


def __getattr__(name: str) -> Any:
    """Import the face on first use, so that ``import agentcompile_core`` needs neither torch nor transformers."""
    if name in ("compile", "load"):
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
