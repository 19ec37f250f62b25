"""AgentCompile: a model in, validated kernels and faster tokens out."""

from typing import TYPE_CHECKING, Any

from .version import __version__

__all__ = ["__version__", "compile", "load"]

if TYPE_CHECKING:
    from .api import compile, load


def __getattr__(name: str) -> Any:
    """Import the face on first use, so that ``import agentcompile_core`` needs neither torch nor transformers."""
    if name in ("compile", "load"):
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
