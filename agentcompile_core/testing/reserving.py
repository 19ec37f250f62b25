"""A reservation on the host, for tests of what grows: small pieces, a limit on memory, and an eye on what is written too far."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ..errors import Reject

if TYPE_CHECKING:
    import torch

ALIGNMENT_BYTES = 256  # at which a range begins


class HostReserved:
    """A ``Reserved`` over buffers that are all there, which grows by pieces of ``piece_bytes`` and refuses more than ``limit_bytes``.

    ``asked`` keeps what was asked of ``hold``; ``check`` raises where something was written that was not held.
    """

    def __init__(self, nbytes: Sequence[int], piece_bytes: int = 64, limit_bytes: int | None = None) -> None:
        import torch

        self.tensors: tuple[torch.Tensor, ...] = tuple(map(_aligned, nbytes))
        self.piece_bytes, self.limit_bytes = piece_bytes, limit_bytes
        self.asked: list[tuple[int, ...]] = []
        self._pieces = [0 for _ in nbytes]

    @property
    def held(self) -> tuple[int, ...]:
        """As said of Reserved."""
        return tuple(min(count * self.piece_bytes, len(tensor)) for count, tensor in zip(self._pieces, self.tensors, strict=True))

    @property
    def held_bytes(self) -> int:
        """As said of Reserved."""
        return sum(self._pieces) * self.piece_bytes

    def hold(self, nbytes: Sequence[int]) -> Literal[True] | Reject:
        """As said of Reserved."""
        self.check()
        self.asked.append(tuple(nbytes))
        wanted = [max(had, self._up(count, tensor)) for had, count, tensor in zip(self._pieces, nbytes, self.tensors, strict=True)]
        if self.limit_bytes is not None and sum(wanted) * self.piece_bytes > self.limit_bytes:
            return Reject(f"{self.limit_bytes - self.held_bytes} bytes are free")
        self._pieces = wanted
        return True

    def give_back(self, nbytes: Sequence[int]) -> None:
        """As said of Reserved."""
        self.check()
        self._pieces = [min(had, self._up(count, tensor)) for had, count, tensor in zip(self._pieces, nbytes, self.tensors, strict=True)]
        for tensor, count in zip(self.tensors, self.held, strict=True):
            tensor[count:].zero_()

    def check(self) -> None:
        """Raises AssertionError where something lies behind what is held."""
        for index, (tensor, count) in enumerate(zip(self.tensors, self.held, strict=True)):
            if bool(tensor[count:].any()):
                last = int(tensor[count:].nonzero().max()) + count
                raise AssertionError(f"range {index} was written up to byte {last}; {count} bytes are held")

    def _up(self, count: int, tensor: "torch.Tensor") -> int:
        return -(-min(count, len(tensor)) // self.piece_bytes)


def _aligned(nbytes: int) -> "torch.Tensor":
    import torch

    room = torch.zeros(nbytes + ALIGNMENT_BYTES, dtype=torch.uint8)
    start = -room.data_ptr() % ALIGNMENT_BYTES
    return room[start : start + nbytes]
