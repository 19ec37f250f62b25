"""Memory of a peer that nobody uses between two of its requests: torch would keep it, where the systems whose turn it is need it.

torch's allocator keeps all that a request had, and eager's cache of K and V grows by copies of new sizes: the old ones stay beside them.
Given back, it is taken again before the clock of the next request starts, piece by piece as it was, so that none pays for what it would
have found there.
"""

import contextlib
from typing import Any, Protocol

import torch

KEPT_BYTES = 2**30  # of less than that nobody is short
SMALL_BYTES = 2**21  # of a piece from which torch serves tensors of up to half as much; all others are larger


class Allocator(Protocol):
    """Of one device: the pieces that torch took of it, and how to change which there are."""

    def idle(self) -> list[int]:
        """Bytes of each piece of which nothing is in use."""

    def take(self, nbytes: int) -> Any:
        """Memory of that size, as long as the result lives; of a new piece where no other has room for it."""

    def empty(self) -> None:
        """Give back all pieces that are idle."""


class TorchAllocator:
    """That of the current CUDA device, without what belongs to captured graphs."""

    def idle(self) -> list[int]:
        """As Allocator's."""
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < KEPT_BYTES:
            return []  # quick to say
        return idle_of(torch.cuda.memory_snapshot())

    def take(self, nbytes: int) -> Any:
        """As Allocator's."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def empty(self) -> None:
        """As Allocator's."""
        torch.cuda.empty_cache()


def idle_of(segments: list[dict[str, Any]]) -> list[int]:
    """The sizes of those segments of ``torch.cuda.memory_snapshot`` that emptying the cache gives back."""
    free = (one for one in segments if not one["active_size"] and tuple(one.get("segment_pool_id", (0, 0))) == (0, 0))
    return sorted((int(one["total_size"]) for one in free), reverse=True)


class IdleMemory:
    """``give_back`` behind a request, ``take_again`` before the next one: then torch has what it had, as if it had kept it."""

    def __init__(self, allocator: Allocator | None) -> None:
        """``allocator``: None where there is none to look after."""
        self._allocator = allocator
        self._given: list[int] = []

    def give_back(self) -> None:
        """All that nothing is using, unless it is little."""
        idle = self._allocator.idle() if self._allocator is not None else []
        if self._allocator is not None and sum(idle) >= KEPT_BYTES:
            self._given = idle
            self._allocator.empty()

    def take_again(self) -> None:
        """What was given back. What is not free any more is left to the request itself."""
        given, self._given = self._given, []
        if self._allocator is None or not given:
            return
        taken = []
        with contextlib.suppress(torch.OutOfMemoryError):
            for nbytes in given:
                for part in (nbytes // 2,) * 2 if nbytes == SMALL_BYTES else (nbytes,):
                    taken.append(self._allocator.take(part))


def of(device: torch.device, kept: bool) -> IdleMemory:
    """That of a process on ``device``; ``kept``: what it has of it is its own (captured graphs), so that nothing is given back."""
    return IdleMemory(None if kept or device.type != "cuda" else TorchAllocator())
