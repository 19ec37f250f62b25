"""A KV cache whose memory comes as requests need it."""

from collections.abc import Callable, Sequence
from typing import Any

from agentcompile_core.plugin_api import Reject, Reserved, UsageError

from .manager import FlashKVCacheManager

STEP = 1024  # positions by which it grows, and begins: a request that is a little longer than the last one finds them there


class GrowingKVCacheManager(FlashKVCacheManager):
    """A FlashKVCacheManager in reserved addresses; a GrowingKVState. ``sizes`` are those of a FlashKVCacheManager.

    K and V of a layer are a range each, in the order of positions, so that a longer cache is more of each range. Where nothing can
    be reserved, it is allocated as a whole, and holds all of its capacity.
    """

    def __init__(self, reserve: Callable[[Sequence[int]], Reserved | Reject], **sizes: Any) -> None:
        self._reserve = reserve
        self._reserved: Reserved | None = None
        self._held = 0
        super().__init__(**sizes)

    @property
    def held(self) -> int:
        """Positions that are memory."""
        return self._held

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that are taken, with what rounding adds."""
        return self.nbytes if self._reserved is None else self._reserved.held_bytes

    def hold(self, positions: int) -> None:
        """See GrowingKVState. It grows by more than what is asked where there is room for that."""
        if self._reserved is not None and positions > self._held:
            if positions > self.capacity:
                raise UsageError(f"the KV cache has {self.capacity} positions, and {positions} were asked for; use a context of at least "
                                 f"{positions}")
            self._held = self._grow(self._reserved, positions, self.capacity)

    def give_back(self, positions: int) -> None:
        """See GrowingKVState."""
        if self._reserved is not None:
            self._reserved.give_back([row * max(positions, self.length) for row in self._rows])
            self._held = self._positions(self._reserved)

    @property
    def _rows(self) -> list[int]:
        """Bytes of one position in each range."""
        return [heads * dim * self.dtype.itemsize for heads, dim in self._heads]

    def _positions(self, reserved: Reserved) -> int:
        return min(nbytes // row for nbytes, row in zip(reserved.held, self._rows, strict=True))

    def _allocate(self, capacity: int) -> None:
        found = self._reserve([row * capacity for row in self._rows]) if self.layers else Reject("a cache without layers")
        if isinstance(found, Reject):
            super()._allocate(capacity)
            self._reserved, self._held = None, capacity
            return
        held = self._grow(found, max(1, self.length), capacity)
        self._reserved, self._held = found, held
        self._take([tensor.view(self.dtype) for tensor in found.tensors], capacity)

    def _grow(self, reserved: Reserved, positions: int, capacity: int) -> int:
        """Hold ``positions``, rounded up where that much is free; how many are held then."""
        rounded = min(capacity, -(-positions // STEP) * STEP)
        for count in dict.fromkeys((rounded, positions)):
            answer = reserved.hold([row * count for row in self._rows])
            if not isinstance(answer, Reject):
                return self._positions(reserved)
        needed = sum(row * positions for row in self._rows) - sum(reserved.held)
        raise UsageError(f"{positions} positions of the KV cache need {needed / 2**20:.1f} MiB more than it holds, and {answer.reason}; "
                         f"use a shorter prompt and fewer new tokens, or free memory of {self.device}")
