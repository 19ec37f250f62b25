"""The calls of the CUDA driver that addresses and memory behind them need, each one checked, through cuda-bindings."""

from typing import Any

from .driver import CudaError

OUT_OF_MEMORY = 2  # CUresult


class VirtualMemory:
    """Of one device, of which a context is current. Addresses and handles are numbers and what the driver returned.

    Args:
        library: ``cuda.bindings.driver``, or what stands for it.
        device: number of the device, the driver's.
    """

    def __init__(self, library: Any, device: int) -> None:
        self._library = library
        kind = library.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._memory = library.CUmemAllocationProp()
        self._memory.type = library.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = library.CUmemAccessDesc()
        self._access.flags = library.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for place in (self._memory, self._access):
            place.location.type, place.location.id = kind, device
        self._device = device

    def supported(self) -> bool:
        """Whether the device maps memory to addresses."""
        attribute = self._library.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        device = self._call("looking up a device", "cuDeviceGet", self._device)
        return bool(self._call("asking a device what it can do", "cuDeviceGetAttribute", attribute, device))

    def granularity(self) -> int:
        """Bytes of which sizes and addresses of mappings are multiples."""
        least = self._library.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("asking for the granularity of memory", "cuMemGetAllocationGranularity", self._memory, least))

    def reserve(self, nbytes: int) -> int:
        """Addresses, nothing behind them."""
        return int(self._call(f"reserving {nbytes} bytes of addresses", "cuMemAddressReserve", nbytes, 0, 0, 0))

    def free(self, address: int, nbytes: int) -> None:
        """Give addresses back: all that were reserved together."""
        self._call("giving addresses back", "cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> Any:
        """The handle of new memory. Raises CudaError, with the code OUT_OF_MEMORY where there is not as much."""
        return self._call(f"taking {nbytes} bytes of memory", "cuMemCreate", nbytes, self._memory, 0)

    def release(self, handle: Any) -> None:
        """Give memory back, at once or with its last mapping."""
        self._call("giving memory back", "cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        """Put memory behind addresses where there is none; ``allow`` makes it accessible."""
        self._call("mapping memory", "cuMemMap", address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo one ``map``, of which these are the address and size."""
        self._call("unmapping memory", "cuMemUnmap", address, nbytes)

    def allow(self, address: int, nbytes: int) -> None:
        """Let the device read and write addresses behind all of which there is memory."""
        self._call("making memory accessible", "cuMemSetAccess", address, nbytes, [self._access], 1)

    def zero(self, address: int, nbytes: int) -> None:
        """Clear memory; may end later."""
        self._call("clearing memory", "cuMemsetD8", address, 0, nbytes)

    def _call(self, doing: str, name: str, *arguments: Any) -> Any:
        code, *found = getattr(self._library, name)(*arguments)
        if int(code):
            _, words = self._library.cuGetErrorString(code)
            raise CudaError(doing, int(code), getattr(code, "name", str(code)), (words or b"unknown error").decode())
        return found[0] if found else None
