"""Plugin: the gemv template family (linear layers of one decode token)."""

from __future__ import annotations

from agentcompile_core.plugin_api import hookimpl

from .gemv import GemvFamily

__all__ = ["GemvFamily", "agentcompile_template_families"]


@hookimpl
def agentcompile_template_families() -> tuple[GemvFamily, ...]:
    """The one family of this distribution."""
    return (GemvFamily(),)
