"""How much of a KV cache is memory, for a cache that grows and for one that is all there (docs/decisions/0032)."""

from typing import Any

from ..plugin.running import KVState

# Positions behind the end of a request that may be written: by warm-ups, where its last steps are captured. No graph has more steps.
AHEAD = 8


def held(kv: KVState) -> int:
    """Positions that may be written."""
    return int(getattr(kv, "held", kv.capacity))


def held_bytes(kv: KVState) -> int:
    """Bytes of memory that K and V take now."""
    found = getattr(kv, "held_bytes", None)
    return sum(tensor.nbytes for tensor in (*kv.keys, *kv.values)) if found is None else int(found)


def hold(kv: KVState, positions: int) -> None:
    """Make the first ``positions`` memory, and ``AHEAD`` behind them, as far as the capacity goes.

    Raises:
        UsageError: there is not enough memory; nothing has changed then.
    """
    needed = min(positions + AHEAD, kv.capacity)
    if needed > held(kv):
        growing: Any = kv
        growing.hold(needed)


def give_back(kv: KVState, positions: int) -> None:
    """Give back what lies behind the first ``positions``, where the cache can."""
    if positions < held(kv) and hasattr(kv, "give_back"):
        kv.give_back(positions)
