"""Buffers between guard bands, and checksums of what must not change."""

import torch
from attrs import frozen
from torch import Tensor

from ..ir.graph import TensorSpec
from ..ops.dtypes import torch_dtype

GUARD_BYTES = 4096
ALIGNMENT_BYTES = 256
NAN_BYTE = 0xFF  # every float type reads NaN where all bits are set
CLONE_BYTES = 64 << 20  # buffers up to here are compared with a copy, larger ones by checksum
ROW = 1024


@frozen(kw_only=True, eq=False)
class Guarded:
    """A buffer with guard bands before and behind it. ``tensor`` is the buffer in its own shape and type."""

    whole: Tensor
    start: int
    nbytes: int
    guard_byte: int
    tensor: Tensor

    @property
    def address(self) -> int:
        """Address of the first byte of the buffer."""
        return int(self.tensor.data_ptr())

    @property
    def bands(self) -> tuple[Tensor, Tensor]:
        """The bytes before and behind the buffer."""
        return self.whole[: self.start], self.whole[self.start + self.nbytes :]

    @property
    def intact(self) -> bool:
        """Whether nobody wrote into the guard bands."""
        return all(bool((band == self.guard_byte).all()) for band in self.bands)


def guarded(spec: TensorSpec, device: str, guard_byte: int = NAN_BYTE, shift_bytes: int = 0) -> Guarded:
    """A new buffer for ``spec`` (not filled), aligned to 256 bytes plus ``shift_bytes``."""
    nbytes = spec.nbytes
    whole = torch.full((nbytes + 2 * GUARD_BYTES + ALIGNMENT_BYTES + shift_bytes,), guard_byte, dtype=torch.uint8, device=device)
    start = GUARD_BYTES + (-(whole.data_ptr() + GUARD_BYTES)) % ALIGNMENT_BYTES + shift_bytes
    flat = whole[start : start + nbytes].view(torch_dtype(spec.dtype))
    return Guarded(whole=whole, start=start, nbytes=nbytes, guard_byte=guard_byte, tensor=flat.view(spec.shape))


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


class Unchanged:
    """Remembers a tensor's bits: a copy of a small one, position-dependent checksums of a large one."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._before = self._take()

    def _take(self) -> Tensor:
        data = as_bytes(self._tensor)
        return data.clone() if data.numel() <= CLONE_BYTES else checksum(data)

    def holds(self) -> bool:
        """Whether the bits are still the same."""
        return torch.equal(self._before, self._take())


def checksum(data: Tensor) -> Tensor:
    """Sums of the 64-bit words of rows and columns, each weighted by its index: any write or swap changes one of them."""
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    rows = words[: words.numel() // ROW * ROW].view(-1, ROW)
    by_row, by_column = rows.sum(1), rows.sum(0)
    weights = torch.arange(1, rows.shape[0] + 1, device=data.device)
    columns = torch.arange(1, ROW + 1, device=data.device)
    tail = data[rows.numel() * 8 :].long()
    return torch.stack(((by_row * weights).sum(), (by_column * columns).sum(), tail.sum(), (tail * tail).sum()))
