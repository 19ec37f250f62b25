"""Addresses on a device that are kept from the beginning, and memory behind them that comes as it is needed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from ..errors import Reject

if TYPE_CHECKING:
    import torch


class Reserved(Protocol):
    """Ranges of addresses, of which the beginning of each is memory; what ``Backend.reserve`` returns.

    ``tensors``: uint8, one over the whole of each range. Addresses never change, so that captured graphs and launches may hold them.
    What is not memory yet may be read and is zero, so that an operator may read all of a range under a mask; nobody writes there.
    Everything is given back with the last tensor that lies in it.
    """

    tensors: "tuple[torch.Tensor, ...]"

    @property
    def held(self) -> tuple[int, ...]:
        """Bytes at the beginning of each range that are memory and may be written, at most its size."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the device's memory that are taken, by all ranges together and with what rounding adds."""

    def hold(self, nbytes: Sequence[int]) -> Literal[True] | Reject:
        """Make at least the first ``nbytes`` of each range memory, zero where it is new; waits for the device where any is needed.

        Contents stay. What is held already stays held, whatever is asked for. The Reject says how much is free; nothing has changed then.
        """

    def give_back(self, nbytes: Sequence[int]) -> None:
        """Give back memory behind the first ``nbytes`` of each range, as far as it comes in whole pieces; zeros are read there then.

        Waits for the device.
        """
