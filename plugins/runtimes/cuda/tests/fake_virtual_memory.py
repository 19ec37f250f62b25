"""The part of the CUDA driver that maps memory to addresses, in Python: it refuses what the driver refuses, and knows what leaks.

Memory is bytes that can be read and written through addresses; new memory holds garbage.
"""

from collections.abc import Iterator
from typing import Any

import cuda.bindings.driver as real

OK = real.CUresult.CUDA_SUCCESS
INVALID = real.CUresult.CUDA_ERROR_INVALID_VALUE
FULL = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
BROKEN = real.CUresult.CUDA_ERROR_UNKNOWN
GARBAGE = 0xCC
NUMBER = 3  # of the device


class FakeDriver:
    """Stands for ``cuda.bindings.driver`` of one device with ``memory_bytes``. ``fails_at``: number of the calls that fail, from 1 on."""

    def __init__(self, memory_bytes: int = 1 << 20, granularity: int = 16) -> None:
        self.memory_bytes, self.granularity = memory_bytes, granularity
        self.supports = True
        self.fails_at: set[int] = set()
        self.calls: list[str] = []
        self.memory: dict[int, bytearray] = {}  # by handle, until nothing holds or maps it
        self.released: set[int] = set()
        self.reserved: dict[int, int] = {}  # address to size
        self.mapped: dict[int, tuple[int, int]] = {}  # address to size and handle
        self.allowed: set[int] = set()  # addresses of granules
        self._next = 1 << 32

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)  # enumerations and structures

    @property
    def used_bytes(self) -> int:
        return sum(map(len, self.memory.values()))

    @property
    def is_empty(self) -> bool:
        return not (self.memory or self.reserved or self.mapped or self.released)

    def read(self, address: int, nbytes: int) -> bytes:
        return b"".join(bytes(memory[offset : offset + count]) for memory, offset, count in self._pieces(address, nbytes))

    def write(self, address: int, content: bytes) -> None:
        at = 0
        for memory, offset, count in self._pieces(address, len(content)):
            memory[offset : offset + count] = content[at : at + count]
            at += count

    def _pieces(self, address: int, nbytes: int) -> Iterator[tuple[bytearray, int, int]]:
        """Where bytes lie, each in one memory: that memory, from where on, and how many."""
        granules = range(address - address % self.granularity, address + nbytes, self.granularity)
        assert not nbytes or self.allowed.issuperset(granules), f"illegal access to {nbytes} bytes at {address}"
        end = address + nbytes
        while address < end:
            found = next(((start, size, handle) for start, (size, handle) in self.mapped.items() if start <= address < start + size), None)
            assert found is not None, f"nothing is mapped at {address}"
            start, size, handle = found
            count = min(end, start + size) - address
            yield self.memory[handle], address - start, count
            address += count

    def _failing(self, name: str) -> bool:
        self.calls.append(name)
        return len(self.calls) in self.fails_at

    def _granules(self, address: int, nbytes: int) -> range:
        return range(address, address + nbytes, self.granularity)

    def _whole(self, *numbers: int) -> bool:
        return all(number % self.granularity == 0 for number in numbers)

    @staticmethod
    def _here(place: Any) -> bool:
        wanted = real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        return place is None or (place.location.type == wanted and place.location.id == NUMBER)

    def _dropped(self, handle: int) -> None:
        if handle in self.released and all(other != handle for _, other in self.mapped.values()):
            del self.memory[handle]
            self.released.discard(handle)

    def cuDeviceGet(self, number: int) -> tuple[Any, ...]:
        return (BROKEN, None) if self._failing("get") else (OK, number)

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, ...]:
        wanted = real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        return (BROKEN, None) if self._failing("attribute") else (OK, int(attribute == wanted and self.supports))

    def cuGetErrorString(self, code: Any) -> tuple[Any, ...]:
        return OK, f"words of {code.name}".encode()

    def cuMemGetAllocationGranularity(self, memory: Any, option: Any) -> tuple[Any, ...]:
        if self._failing("granularity"):
            return BROKEN, None
        pinned = memory.type == real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        return (OK, self.granularity) if pinned and self._here(memory) else (INVALID, None)

    def cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        if self._failing("reserve"):
            return BROKEN, None
        if not nbytes or not self._whole(nbytes) or alignment or address or flags:
            return INVALID, None
        found, self._next = self._next, self._next + nbytes + self.granularity
        self.reserved[found] = nbytes
        return OK, real.CUdeviceptr(found)

    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[Any, ...]:
        if self._failing("free"):
            return (BROKEN,)
        if self.reserved.get(int(address)) != nbytes or any(int(address) <= at < int(address) + nbytes for at in self.mapped):
            return (INVALID,)
        del self.reserved[int(address)]
        return (OK,)

    def cuMemCreate(self, nbytes: int, memory: Any, flags: int) -> tuple[Any, ...]:
        if self._failing("create"):
            return BROKEN, None
        if not nbytes or not self._whole(nbytes) or flags or not self._here(memory):
            return INVALID, None
        if self.used_bytes + nbytes > self.memory_bytes:
            return FULL, None
        self._next += 1 << 20
        self.memory[self._next] = bytearray([GARBAGE]) * nbytes
        return OK, self._next

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        if self._failing("release"):
            return (BROKEN,)
        if handle not in self.memory or handle in self.released:
            return (INVALID,)
        self.released.add(handle)
        self._dropped(handle)
        return (OK,)

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        if self._failing("map"):
            return (BROKEN,)
        inside = any(start <= address and address + nbytes <= start + size for start, size in self.reserved.items())
        free = not any(start < address + nbytes and address < start + size for start, (size, _) in self.mapped.items())
        known = handle in self.memory and handle not in self.released and nbytes <= len(self.memory[handle])
        if not (inside and free and known and nbytes and self._whole(address, nbytes)) or offset or flags:
            return (INVALID,)
        self.mapped[address] = nbytes, handle
        return (OK,)

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[Any, ...]:
        if self._failing("unmap"):
            return (BROKEN,)
        if address not in self.mapped or self.mapped[address][0] != nbytes:  # one whole mapping, no more and no less
            return (INVALID,)
        _, handle = self.mapped.pop(address)
        self.allowed -= set(self._granules(address, nbytes))
        self._dropped(handle)
        return (OK,)

    def cuMemSetAccess(self, address: int, nbytes: int, access: list[Any], count: int) -> tuple[Any, ...]:
        if self._failing("allow"):
            return (BROKEN,)
        there = {at for start, (size, _) in self.mapped.items() for at in self._granules(start, size)}
        granules = set(self._granules(address, nbytes))
        right = [a.flags for a in access] == [real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE] and count == 1
        right = right and all(map(self._here, access))
        if not granules or not granules <= there or not self._whole(address, nbytes) or not right:
            return (INVALID,)
        self.allowed |= granules
        return (OK,)

    def cuMemsetD8(self, address: int, byte: int, nbytes: int) -> tuple[Any, ...]:
        if self._failing("set"):
            return (BROKEN,)
        self.write(address, bytes([byte]) * nbytes)
        return (OK,)
