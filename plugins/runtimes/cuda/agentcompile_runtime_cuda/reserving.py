"""Ranges of addresses, of which the beginning is memory and the rest reads as zeros (docs/decisions/0032).

Behind whatever is not held yet lies one piece of zeros, mapped again and again, so that all addresses can be read. To hold more,
new memory is taken for every range first; only then are mappings replaced, and what fails puts back those that were there.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from agentcompile_core.plugin_api import Reject

from .driver import CudaError
from .virtual_memory import OUT_OF_MEMORY, VirtualMemory


class Pieces:
    """One range: pieces of memory from ``address`` on, zeros behind them up to ``nbytes``, a multiple of the granularity."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self.found: list[tuple[int, int, Any]] = []  # offset, size and handle of each piece, one behind the other
        self.zeros: set[int] = set()  # offsets where the zeros are mapped

    @property
    def end(self) -> int:
        """Bytes that are held."""
        return self.found[-1][0] + self.found[-1][1] if self.found else 0


class Mappings:
    """Several ranges in one reservation; the memory and the addresses are given back with this object.

    Args:
        calls: of the device.
        sizes: of the ranges, in bytes.
        wait: returns when nothing runs on the device.
        forget: gives memory back that is held for later use, before the lack of it is believed.

    Raises:
        CudaError: addresses or the zeros are not to be had; everything is given back then.
    """

    def __init__(self, calls: VirtualMemory, sizes: Sequence[int], wait: Callable[[], None], forget: Callable[[], None]) -> None:
        self._calls, self._wait, self._forget = calls, wait, forget
        self.broken = ""  # why the ranges are not what they should be any more
        self.granularity = calls.granularity()
        padded = [self.rounded(size) for size in sizes]
        self.ranges: list[Pieces] = []
        (self._zero,) = self._taken([self.granularity])
        try:
            start = calls.reserve(sum(padded))
        except Exception:
            calls.release(self._zero)
            raise
        end = weakref.finalize(self, _all_given_back, calls, wait, (start, sum(padded)), self.ranges, (self._zero, self.granularity))
        end.atexit = False  # the driver may be gone by then, and takes everything back itself
        try:
            for index, size in enumerate(padded):
                self.ranges.append(Pieces(start + sum(padded[:index]), size))
                self._fill(self.ranges[-1])
            calls.zero(start, self.granularity)
            wait()
        except Exception:
            end()
            raise

    @property
    def held_bytes(self) -> int:
        """Memory that is taken, the zeros among it."""
        return self.granularity + sum(one.end for one in self.ranges)

    def rounded(self, nbytes: int) -> int:
        """The next multiple of the granularity."""
        return -(-nbytes // self.granularity) * self.granularity

    def hold(self, nbytes: Sequence[int]) -> None:
        """Memory for the first ``nbytes`` of each range.

        Raises:
            CudaError: there is not enough, or the driver fails; the ranges are as they were, unless they are ``broken``.
        """
        if self.broken:
            raise RuntimeError(self.broken)
        wanted = [(one, min(self.rounded(count), one.nbytes)) for one, count in zip(self.ranges, nbytes, strict=True)]
        growing = [(one, end) for one, end in wanted if end > one.end]
        if not growing:
            return
        handles = self._taken([end - one.end for one, end in growing])
        before = [(one, len(one.found)) for one, _ in growing]
        try:
            self._wait()  # nothing may read or write what is replaced
            for (one, end), handle in zip(growing, handles, strict=True):
                self._replace(one, end, handle)
            self._wait()
        except Exception as exc:
            self._undo(before, exc)
            for handle in handles:
                self._calls.release(handle)
            raise

    def give_back(self, nbytes: Sequence[int]) -> None:
        """Zeros in place of whole pieces behind the first ``nbytes`` of each range."""
        if self.broken:
            raise RuntimeError(self.broken)
        unneeded = [(one, count) for one, count in zip(self.ranges, nbytes, strict=True) if one.found and one.found[-1][0] >= count]
        if not unneeded:
            return
        self._wait()
        try:
            for one, count in unneeded:
                while one.found and one.found[-1][0] >= count:
                    self._calls.release(self._dropped(one))
                    self._fill(one)
        except Exception as exc:
            self._undo((), exc)

    def _taken(self, sizes: Sequence[int]) -> list[Any]:
        """Handles of new memory, all or none."""
        try:
            return self._created(sizes)
        except CudaError as exc:
            if exc.code != OUT_OF_MEMORY:
                raise
        self._forget()
        return self._created(sizes)

    def _created(self, sizes: Sequence[int]) -> list[Any]:
        handles: list[Any] = []
        try:
            for size in sizes:
                handles.append(self._calls.create(size))
        except Exception:
            for handle in handles:
                self._calls.release(handle)
            raise
        return handles

    def _replace(self, one: Pieces, end: int, handle: Any) -> None:
        """Memory in place of the zeros that are mapped from the end of a range's pieces up to ``end``."""
        offset, size = one.end, end - one.end
        for place in range(offset, end, self.granularity):
            self._calls.unmap(one.address + place, self.granularity)
            one.zeros.discard(place)
        self._calls.map(one.address + offset, size, handle)
        one.found.append((offset, size, handle))
        self._calls.allow(one.address + offset, size)
        self._calls.zero(one.address + offset, size)

    def _dropped(self, one: Pieces) -> Any:
        """The handle of a range's last piece, which is mapped no more."""
        offset, size, handle = one.found[-1]
        self._calls.unmap(one.address + offset, size)
        one.found.pop()
        return handle

    def _fill(self, one: Pieces, again: bool = False) -> None:
        """Zeros wherever nothing is mapped; ``again``: what is mapped may not be accessible yet."""
        start, missing = one.end, [place for place in range(one.end, one.nbytes, self.granularity) if place not in one.zeros]
        for place in missing:
            self._calls.map(one.address + place, self.granularity, self._zero)
            one.zeros.add(place)
        if missing or (again and start < one.nbytes):
            self._calls.allow(one.address + start, one.nbytes - start)

    def _undo(self, before: Sequence[tuple[Pieces, int]], why: Exception) -> None:
        """Every range as it was; of those in ``before`` no more than so many pieces."""
        try:
            for one, count in before:
                while len(one.found) > count:
                    self._dropped(one)
            for one in self.ranges:
                self._fill(one, again=True)
        except Exception as exc:
            self.broken = f"memory of reserved addresses cannot be put back ({exc}) after {why}; start the process again"
            raise RuntimeError(self.broken) from exc


def _all_given_back(calls: VirtualMemory, wait: Callable[[], None], reserved: tuple[int, int], ranges: Sequence[Pieces],
                    zeros: tuple[Any, int]) -> None:
    """Undo everything, as far as the device lets us. ``zeros``: the handle, and its size."""
    with contextlib.suppress(Exception):
        wait()
    for one in ranges:
        for offset, size, handle in one.found:
            with contextlib.suppress(Exception):
                calls.unmap(one.address + offset, size)
            with contextlib.suppress(Exception):
                calls.release(handle)
        for place in one.zeros:
            with contextlib.suppress(Exception):
                calls.unmap(one.address + place, zeros[1])
    with contextlib.suppress(Exception):
        calls.release(zeros[0])
    with contextlib.suppress(Exception):
        calls.free(*reserved)


class _Range:
    """What torch makes a tensor of; the tensor keeps it, and with it the memory."""

    def __init__(self, address: int, nbytes: int, owner: Mappings) -> None:
        self._address, self._nbytes, self._owner = address, nbytes, owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._nbytes,), "typestr": "|u1", "data": (self._address, False), "strides": None, "version": 3}


class CudaReserved:
    """A ``Reserved`` over mappings of the current device."""

    def __init__(self, sizes: Sequence[int], mappings: Mappings) -> None:
        import torch

        self._mappings, self._sizes, self._device = mappings, tuple(sizes), torch.cuda.current_device()
        self.tensors = tuple(
            torch.as_tensor(_Range(one.address, size, mappings), device=f"cuda:{self._device}")
            for one, size in zip(mappings.ranges, self._sizes, strict=True))
        if any(tensor.data_ptr() != one.address for tensor, one in zip(self.tensors, mappings.ranges, strict=True)):
            raise RuntimeError("torch copied what it should have taken as it lies")

    @property
    def held(self) -> tuple[int, ...]:
        """Bytes of each range that are memory."""
        return tuple(min(one.end, size) for one, size in zip(self._mappings.ranges, self._sizes, strict=True))

    @property
    def held_bytes(self) -> int:
        """Memory that is taken, whole pieces of the device's granularity."""
        return self._mappings.held_bytes

    def hold(self, nbytes: Sequence[int]) -> Literal[True] | Reject:
        """By new memory in place of zeros; the Reject says how much is free, or what the driver said."""
        import torch

        with torch.cuda.device(self._device):
            try:
                self._mappings.hold(nbytes)
            except CudaError as exc:
                free = torch.cuda.mem_get_info()[0]
                return Reject(f"{free / 2**20:.1f} MiB of the device are free" if exc.code == OUT_OF_MEMORY else str(exc))
        return True

    def give_back(self, nbytes: Sequence[int]) -> None:
        """By zeros in place of memory."""
        import torch

        with torch.cuda.device(self._device):
            self._mappings.give_back(nbytes)


def reserve(nbytes: Sequence[int]) -> CudaReserved | Reject:
    """Ranges on torch's current device."""
    import torch
    from cuda.bindings import driver as library

    torch.cuda.synchronize()  # makes torch's context current in this thread
    try:
        device = torch.cuda.current_device()
        calls = VirtualMemory(library, device)
        if not calls.supported():
            return Reject("the device maps no memory to reserved addresses")
        return CudaReserved(nbytes, Mappings(calls, nbytes, partial(torch.cuda.synchronize, device), torch.cuda.empty_cache))
    except Exception as exc:  # the cache is allocated as a whole then, which tells what is wrong if it is more than this
        return Reject(f"addresses cannot be reserved: {exc}")
