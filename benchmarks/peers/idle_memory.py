"""Memory of a peer that nobody uses between two of its requests: torch would keep it, where the systems whose turn it is need it.

torch's allocator keeps all that a request had, and eager's cache of K and V grows by copies of new sizes: the old ones stay beside them.
Given back, it is taken again before the clock of the next request starts, so that none pays for what it would have found there.
"""

import contextlib
from typing import Any, Protocol

import torch

KEPT_BYTES = 2**30  # of less than that nobody is short
PIECE_BYTES = {"small_pool": 2**20, "large_pool": 0}  # of one allocation that comes from a pool of torch's allocator; 0: as large as any


class Allocator(Protocol):
    """Of one device: what torch took of it and what of that is in use, and how to change the first."""

    def reserved(self, pool: str) -> int:
        """Bytes that a pool has of the device."""

    def unused(self) -> int:
        """Bytes of all pools that nothing is using."""

    def take(self, nbytes: int) -> Any:
        """Memory of that size, as long as the result lives."""

    def empty(self) -> None:
        """Give back what nothing is using."""


class TorchAllocator:
    """That of the current CUDA device."""

    def reserved(self, pool: str) -> int:
        """As Allocator's."""
        return int(torch.cuda.memory_stats()[f"reserved_bytes.{pool}.current"])

    def unused(self) -> int:
        """As Allocator's."""
        return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def take(self, nbytes: int) -> Any:
        """As Allocator's."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def empty(self) -> None:
        """As Allocator's."""
        torch.cuda.empty_cache()


class IdleMemory:
    """``give_back`` behind a request, ``take_again`` before the next one: then torch has as much as if nothing had been given back."""

    def __init__(self, allocator: Allocator | None) -> None:
        """``allocator``: None where there is none to look after."""
        self._allocator = allocator
        self._most = dict.fromkeys(PIECE_BYTES, 0)

    def give_back(self) -> None:
        """All that nothing is using, unless it is little."""
        allocator = self._allocator
        if allocator is None:
            return
        self._most = {pool: max(most, allocator.reserved(pool)) for pool, most in self._most.items()}
        if allocator.unused() >= KEPT_BYTES:
            allocator.empty()

    def take_again(self) -> None:
        """As much as torch ever had behind a request. What is not free any more is left to the request itself."""
        allocator = self._allocator
        if allocator is None:
            return
        taken = []
        with contextlib.suppress(torch.OutOfMemoryError):
            for pool, piece in PIECE_BYTES.items():
                while (lacking := self._most[pool] - allocator.reserved(pool)) > 0:
                    taken.append(allocator.take(piece or lacking))
        del taken


def of(device: torch.device, kept: bool) -> IdleMemory:
    """That of a process on ``device``; ``kept``: what it has of it is its own (captured graphs), so that nothing is given back."""
    return IdleMemory(None if kept or device.type != "cuda" else TorchAllocator())
