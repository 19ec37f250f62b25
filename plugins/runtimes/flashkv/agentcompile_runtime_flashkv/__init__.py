"""Runtime ``flashkv`` (role kv_cache): preallocated K and V with fixed addresses and one device length."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from agentcompile_core.plugin_api import KVCacheRuntime, KVSpec, KVState, Reject, Reserved, RuntimeIntegration, hookimpl

if TYPE_CHECKING:
    from .manager import FlashKVCacheManager

# Memory of a device is mapped in pieces of usually 2 MiB, one at least for K and one for V of each layer. A cache that grows gains
# something where it is not small, and where a range is several such pieces.
SMALL_BYTES = 256 << 20
SMALL_RANGE_BYTES = 8 << 20

__all__ = ["FlashKVCacheManager", "FlashKVRuntime"]


class FlashKVRuntime(KVCacheRuntime):
    """Allocates a FlashKVCacheManager; a GrowingKVCacheManager where a large one can grow."""

    name = "flashkv"
    version = 1
    preference = 10

    def allocate(self, kv: KVSpec, device: str) -> KVState:
        """Allocate K and V of all layers, zeroed; raises UsageError where they do not fit the device's free memory."""
        from .manager import FlashKVCacheManager

        return FlashKVCacheManager(**_sizes(kv, device))

    def allocate_growing(self, kv: KVSpec, device: str, reserve: Callable[[Sequence[int]], Reserved | Reject]) -> KVState:
        """Large caches in reserved addresses, others as ``allocate``; raises UsageError where not even the beginning fits."""
        from .growing import GrowingKVCacheManager

        ranges = 2 * kv.layers
        if kv.nbytes <= SMALL_BYTES or kv.nbytes <= ranges * SMALL_RANGE_BYTES:
            return self.allocate(kv, device)
        return GrowingKVCacheManager(reserve, **_sizes(kv, device))


def _sizes(kv: KVSpec, device: str) -> dict[str, Any]:
    import torch

    names = ("kv_heads", "head_dim", "value_dim")
    heads = {name: tuple(getattr(one, name) for one in kv.heads) if kv.others else getattr(kv, name) for name in names}
    return {"layers": kv.layers, **heads, "capacity": kv.capacity, "dtype": getattr(torch, kv.dtype.value), "device": device}


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
