"""Runtime ``flashkv`` (role kv_cache): preallocated K and V with fixed addresses and one device length."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from agentcompile_core.plugin_api import KVCacheRuntime, KVSpec, KVState, RuntimeIntegration, hookimpl

if TYPE_CHECKING:
    from .manager import FlashKVCacheManager

__all__ = ["FlashKVCacheManager", "FlashKVRuntime"]


class FlashKVRuntime(KVCacheRuntime):
    """Allocates a FlashKVCacheManager."""

    name = "flashkv"
    version = 1
    preference = 10

    def allocate(self, kv: KVSpec, device: str) -> KVState:
        """Allocate K and V of all layers, zeroed; raises UsageError where they do not fit the device's free memory."""
        import torch

        from .manager import FlashKVCacheManager

        return FlashKVCacheManager(layers=kv.layers, kv_heads=kv.kv_heads, head_dim=kv.head_dim, value_dim=kv.value_dim,
                                   capacity=kv.capacity, dtype=getattr(torch, kv.dtype.value), device=device)


@hookimpl
def agentcompile_runtimes() -> Iterable[RuntimeIntegration]:
    """Offer ``flashkv``."""
    return (FlashKVRuntime(),)


def __getattr__(name: str) -> Any:
    """Import the manager on first use: it needs torch."""
    if name == "FlashKVCacheManager":
        from .manager import FlashKVCacheManager

        return FlashKVCacheManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
