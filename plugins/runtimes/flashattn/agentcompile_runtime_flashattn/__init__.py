"""Implementation ``attention``: flash-attn appends K and V to the cache and attends over what is cached."""

from collections.abc import Iterable

from agentcompile_core.plugin_api import Implementation, hookimpl

from .attention import FlashAttention

__all__ = ["FlashAttention"]


@hookimpl
def agentcompile_implementations() -> Iterable[Implementation]:
    """Offer ``attention``."""
    return (FlashAttention(),)
