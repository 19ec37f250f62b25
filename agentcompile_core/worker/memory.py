"""Buffers between guard bands, side by side in one allocation, and checksums of what must not change."""

from collections.abc import Iterable, Mapping

import torch
from attrs import frozen
from torch import Tensor

from ..ir.graph import TensorSpec
from ..ops.bits import as_bytes, words
from ..ops.dtypes import torch_dtype

GUARD_BYTES = 4096
ALIGNMENT_BYTES = 256
NAN_BYTE = 0xFF  # every float type reads NaN where all bits are set
CLONE_BYTES = 64 << 20  # memory up to here is compared with a copy, more of it by checksum
ROW = 1024


@frozen(kw_only=True, eq=False)
class Guarded:
    """A buffer with guard bands before and behind it. ``tensor`` is the buffer in its own shape and type, ``bands`` are bytes."""

    guard_byte: int
    bands: tuple[Tensor, Tensor]
    tensor: Tensor

    @property
    def address(self) -> int:
        """Address of the first byte of the buffer."""
        return int(self.tensor.data_ptr())

    @property
    def intact(self) -> bool:
        """Whether nobody wrote into the guard bands."""
        return all(bool((band == self.guard_byte).all()) for band in self.bands)


class Arena:
    """Guarded buffers in one allocation, so that they are made, copied and compared in one operation each.

    Every buffer begins at a multiple of 256 bytes plus ``shifts`` of its name plus ``shift_bytes``, which moves them all.
    ``content`` are the bytes of all buffers and bands; two arenas of the same buffers lie byte under byte there.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], device: str, guard_byte: int = NAN_BYTE, *, shift_bytes: int = 0,
                 shifts: Mapping[str, int] | None = None) -> None:
        starts: dict[str, int] = {}
        end = 0
        for name, spec in specs.items():
            starts[name] = _aligned(end + GUARD_BYTES) + (shifts or {}).get(name, 0)
            end = starts[name] + spec.nbytes + GUARD_BYTES
        end = _aligned(end)
        whole = torch.full((end + ALIGNMENT_BYTES + shift_bytes,), guard_byte, dtype=torch.uint8, device=device)
        first = -whole.data_ptr() % ALIGNMENT_BYTES + shift_bytes
        self.content = whole[first : first + end]
        self.guard_byte = guard_byte
        self.buffers = {name: self._buffer(spec, starts[name]) for name, spec in specs.items()}

    def _buffer(self, spec: TensorSpec, start: int) -> Guarded:
        end = start + spec.nbytes
        flat = self.content[start:end].view(torch_dtype(spec.dtype))
        bands = (self.content[start - GUARD_BYTES : start], self.content[end : end + GUARD_BYTES])
        return Guarded(guard_byte=self.guard_byte, bands=bands, tensor=flat.view(spec.shape))

    def damaged(self) -> Tensor:
        """Whether a guard band was written: a bool on the device, which nobody has waited for."""
        return (torch.cat([band for buffer in self.buffers.values() for band in buffer.bands]) != self.guard_byte).any()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Unchanged:
    """Remembers the bits of an arena: a copy of a small one, position-dependent checksums of a large one.

    ``like`` is an arena of the same buffers that holds the same and that nobody writes; it saves the copy.
    """

    def __init__(self, arena: Arena, like: Arena | None = None) -> None:
        self._arena = arena
        self._copied = arena.content.nbytes <= CLONE_BYTES
        content = arena.content if like is None else like.content
        self._before = checksum(content) if not self._copied else content.clone() if like is None else content

    def changed(self) -> Tensor:
        """Whether the bits are others: a bool on the device, which nobody has waited for."""
        now = self._arena.content if self._copied else checksum(self._arena.content)
        return (words(now) != words(self._before)).any()

    def names(self) -> list[str]:
        """The buffers that hold other bits than before, guard bands aside."""
        if not self._copied:  # a checksum tells no place
            whole = [name for name, buffer in self._arena.buffers.items() if buffer.intact]
            return whole if bool(self.changed()) else []
        offset = self._arena.content.storage_offset()
        found = []
        for name, buffer in self._arena.buffers.items():
            data = as_bytes(buffer.tensor)
            start = data.storage_offset() - offset
            if not torch.equal(data, self._before[start : start + data.numel()]):
                found.append(name)
        return found


def any_of(flags: Iterable[Tensor]) -> bool:
    """Whether one of some bools on one device is set; the device is waited for once."""
    found = list(flags)
    return bool(torch.stack(found).any()) if found else False


def checksum(data: Tensor) -> Tensor:
    """Sums of the 64-bit words of rows and columns, each weighted by its index: any write or swap changes one of them."""
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    rows = words[: words.numel() // ROW * ROW].view(-1, ROW)
    by_row, by_column = rows.sum(1), rows.sum(0)
    weights = torch.arange(1, rows.shape[0] + 1, device=data.device)
    columns = torch.arange(1, ROW + 1, device=data.device)
    tail = data[rows.numel() * 8 :].long()
    return torch.stack(((by_row * weights).sum(), (by_column * columns).sum(), tail.sum(), (tail * tail).sum()))
