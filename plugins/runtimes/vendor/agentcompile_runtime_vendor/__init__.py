"""Implementations ``linear`` and ``attention``: the vendor's libraries, called through torch."""

from collections.abc import Iterable

from agentcompile_core.plugin_api import Implementation, hookimpl

from .attention import VendorAttention
from .linear import VendorLinear

__all__ = ["VendorAttention", "VendorLinear"]


@hookimpl
def agentcompile_implementations() -> Iterable[Implementation]:
    """Offer ``linear`` and ``attention``."""
    return (VendorLinear(), VendorAttention())
