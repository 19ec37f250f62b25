"""Launches kernels of a built library in this process, with the argument array of a CUDA driver launch."""

import ctypes
import enum
import functools
import math
import mmap
import re
import shutil
import struct
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from attrs import field, frozen

from agentcompile_core.plugin_api import AgentCompileError, UsageError

CONSTRUCTOR_GUARD = "_ZGV"  # how their names begin
_ELF_SECTIONS, _ELF_COUNTS, _ELF_HEADER, _ELF_SYMBOL = (struct.Struct(form) for form in ("=Q", "=HH", "=IIQQQQIIQQ", "=IBBHQQ"))
_ELF_SYMBOLS = 2  # the kind of a section of all names, in contrast to that of those that are exported
_CODE_ADDRESS = re.compile(r" \[code \+0x([0-9a-f]+)\]")


class EmulationError(AgentCompileError):
    """A launch broke a rule of the CUDA execution model, or did not end; the message says which thread did what where."""


class Access(enum.IntEnum):
    """What a kernel may do with a buffer. A WRITE buffer is an output: reading a byte before it is written is an error."""

    READ = 0
    WRITE = 1
    READ_WRITE = 2


class ThreadOrder(enum.IntEnum):
    """Order of warps and of the lanes in a warp, and of the blocks of a grid."""

    ASCENDING = 0
    DESCENDING = 1
    RANDOM = 2


@frozen(kw_only=True)
class Buffer:
    """A pointer argument: address and size in bytes (address 0: the null pointer).

    ``written_by_the_chain``: an earlier kernel writes it, so under programmatic dependent launch it may not be read
    before the dependency wait. ``published``: later kernels read it before theirs (``ac::load_hint``), so a thread that
    writes it must have fenced what it wrote before.
    """

    name: str
    address: int
    nbytes: int
    access: Access = Access.READ_WRITE
    written_by_the_chain: bool = True
    published: bool = False


MOST_AXES = 4


class Tiles(ctypes.Structure):
    """What fetches tiles of a view, by value; as large as a CUtensorMap. ``operand``: the buffer that the view lies in."""

    _fields_ = [("address", ctypes.c_void_p), ("element_bytes", ctypes.c_uint), ("swizzle_bytes", ctypes.c_uint), ("axes", ctypes.c_uint),
                ("unused", ctypes.c_uint), ("extents", ctypes.c_uint * MOST_AXES), ("tile", ctypes.c_uint * MOST_AXES),
                ("steps", ctypes.c_ulonglong * MOST_AXES), ("operand_address", ctypes.c_void_p),
                ("operand_bytes", ctypes.c_ulonglong), ("name", ctypes.c_char * 24)]
    operand: Buffer


Scalar = ctypes.c_int | ctypes.c_longlong | ctypes.c_float
Argument = Buffer | Scalar | Tiles


@frozen(kw_only=True)
class LaunchOptions:
    """How a grid is run.

    ``warp_skewed``: a warp runs as far as it can before the next starts (finds missing trailing barriers).
    ``lazy_copies``: asynchronous copies land as late as the program allows, their destination is garbage until then.
    ``preempt_per_million``: chance that a checked access lets another thread run first.
    ``deadline_s``: wall time limit of the launch, 0 for none.
    """

    order: ThreadOrder = ThreadOrder.ASCENDING
    warp_skewed: bool = True
    lazy_copies: bool = False
    programmatic_launch: bool = False
    preempt_per_million: int = 0
    seed: int = 0
    deadline_s: float = field(default=60.0)


# Between them these orders expose every planted synchronisation bug of the tests in plain builds too.
SCHEDULES: tuple[LaunchOptions, ...] = (
    LaunchOptions(warp_skewed=False, lazy_copies=True),
    LaunchOptions(order=ThreadOrder.DESCENDING, warp_skewed=False, lazy_copies=False),
    LaunchOptions(order=ThreadOrder.RANDOM, warp_skewed=False, lazy_copies=True),
    LaunchOptions(lazy_copies=True),
    LaunchOptions(order=ThreadOrder.DESCENDING, lazy_copies=True),
    LaunchOptions(order=ThreadOrder.RANDOM, lazy_copies=True),
)


class _BufferSpec(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("role", ctypes.c_int),
                ("written_by_the_chain", ctypes.c_int), ("published", ctypes.c_int)]


class _LaunchRequest(ctypes.Structure):
    _fields_ = [("entry", ctypes.c_char_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
                ("dynamic_shared_bytes", ctypes.c_size_t), ("arguments", ctypes.POINTER(ctypes.c_void_p)),
                ("buffers", ctypes.POINTER(_BufferSpec)), ("cluster", ctypes.c_int),
                ("buffer_count", ctypes.c_int), ("lane_order", ctypes.c_int),
                ("warp_skewed", ctypes.c_int), ("lazy_copies", ctypes.c_int), ("checks", ctypes.c_int),
                ("programmatic_launch", ctypes.c_int), ("preempt_per_million", ctypes.c_long), ("seed", ctypes.c_ulonglong),
                ("deadline_s", ctypes.c_double), ("stacks", ctypes.c_void_p), ("bytes_per_stack", ctypes.c_size_t)]


MAX_THREADS = 1024
MAX_CLUSTER = 16
MAP_NORESERVE = 0x4000  # Linux; the standard library names it only from 3.12 on
BYTES_PER_STACK = 128 << 10  # of one emulated thread; sanitizers make frames larger
_PROCESS_LOCK = threading.Lock()


@functools.cache
def _stacks(threads: int) -> ctypes.c_void_p:
    """Address of the memory for so many threads: reserved once in the process, taken up as it is touched."""
    memory = mmap.mmap(-1, threads * BYTES_PER_STACK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    _KEPT.append(memory)
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))


_KEPT: list[mmap.mmap] = []


class LaunchShape(NamedTuple):
    """Blocks, threads, blocks per cluster and dynamic shared memory of one launch."""

    grid: Sequence[int]
    block: Sequence[int]
    cluster: int
    dynamic_shared_bytes: int


class PreparedLaunch:
    """One launch with its argument values; call it as often as wanted. Keeps every C structure it points to alive."""

    def __init__(self, module: "EmulatedModule", entry: str, shape: "LaunchShape", arguments: Sequence[Argument],
                 options: LaunchOptions) -> None:
        self._module = module
        given = [argument for argument in arguments if isinstance(argument, Buffer)]
        known = {buffer.address for buffer in given}
        buffers = [*given, *(a.operand for a in arguments if isinstance(a, Tiles) and a.operand.address not in known)]
        self._values = [ctypes.c_void_p(a.address or None) if isinstance(a, Buffer) else a for a in arguments]
        pointers = [ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in self._values]
        self._array = (ctypes.c_void_p * max(1, len(pointers)))(*pointers)
        live = [b for b in buffers if b.address]
        stacks = MAX_THREADS if math.prod(shape.block) * shape.cluster <= MAX_THREADS else MAX_THREADS * MAX_CLUSTER
        self._specs = (_BufferSpec * max(1, len(live)))(*[
            _BufferSpec(b.name.encode(), b.address, b.nbytes, int(b.access), int(b.written_by_the_chain), int(b.published)) for b in live])
        self._request = _LaunchRequest(
            entry=entry.encode(), grid=(ctypes.c_uint * 3)(*_three(shape.grid)), block=(ctypes.c_uint * 3)(*_three(shape.block)),
            dynamic_shared_bytes=shape.dynamic_shared_bytes, arguments=self._array, buffers=self._specs, cluster=shape.cluster,
            buffer_count=len(live),
            lane_order=int(options.order), warp_skewed=options.warp_skewed, lazy_copies=options.lazy_copies,
            checks=module.checked, programmatic_launch=options.programmatic_launch,
            preempt_per_million=options.preempt_per_million, seed=options.seed, deadline_s=options.deadline_s,
            stacks=_stacks(stacks), bytes_per_stack=BYTES_PER_STACK)

    def reorder(self, order: LaunchOptions, seed: int) -> None:
        """Take the thread order and the lateness of copies from ``order`` from the next run on, and draw random orders from ``seed``."""
        request = self._request
        request.lane_order, request.warp_skewed, request.lazy_copies = int(order.order), order.warp_skewed, order.lazy_copies
        request.seed = seed

    def __call__(self) -> None:
        """Run the grid to its end.

        Raises:
            EmulationError: the kernel broke a rule or passed the deadline.
        """
        self._module._run(self._request)


def _three(shape: Sequence[int]) -> tuple[int, int, int]:
    if not 1 <= len(shape) <= 3 or any(n < 1 for n in shape):
        raise UsageError(f"a grid or block of shape {tuple(shape)}: give one to three positive numbers")
    x, y, z = (*shape, 1, 1)[:3]
    return int(x), int(y), int(z)


class EmulatedModule:
    """A library from ``engine.build``, loaded. One launch at a time in the whole process; other threads wait."""

    def __init__(self, library: Path, *, checked: bool) -> None:
        self.library = library
        self.checked = checked
        loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_LOCAL)
        self._launch = loaded.emu_launch
        self._launch.argtypes = [ctypes.POINTER(_LaunchRequest), ctypes.c_char_p, ctypes.c_size_t]
        self._launch.restype = ctypes.c_int
        if checked:
            _name_constructor_guards(loaded, library)

    def prepare(self, entry: str, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Argument],
                dynamic_shared_bytes: int = 0, options: LaunchOptions = LaunchOptions(), cluster: int = 1) -> PreparedLaunch:
        """Return the launch as a callable. Buffers must stay alive and in place as long as it is used.

        ``cluster``: blocks per cluster along x, 1 to 16, dividing the grid.
        """
        if not 1 <= cluster <= MAX_CLUSTER:
            raise UsageError(f"clusters of {cluster} blocks; use 1 to {MAX_CLUSTER}")
        return PreparedLaunch(self, entry, LaunchShape(grid, block, cluster, dynamic_shared_bytes), arguments, options)

    def launch(self, entry: str, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Argument],
               dynamic_shared_bytes: int = 0, options: LaunchOptions = LaunchOptions(), cluster: int = 1) -> None:
        """Prepare and run once. Raises EmulationError."""
        self.prepare(entry, grid, block, arguments, dynamic_shared_bytes, options, cluster)()

    def _run(self, request: _LaunchRequest) -> None:
        error = ctypes.create_string_buffer(2048)
        with _PROCESS_LOCK:
            code = self._launch(ctypes.byref(request), error, len(error))
        if code:
            raise EmulationError(_with_source_lines(error.value.decode(errors="replace"), self.library))


def _name_constructor_guards(loaded: ctypes.CDLL, library: Path) -> None:
    """Tell the runtime where the compiler's own guards of static variables are."""
    places = _symbols(library.read_bytes())
    base = (ctypes.cast(loaded.emu_launch, ctypes.c_void_p).value or 0) - places["emu_launch"]
    loaded.emu_add_constructor_guard.argtypes = [ctypes.c_void_p]
    for name, place in places.items():
        if name.startswith(CONSTRUCTOR_GUARD):
            loaded.emu_add_constructor_guard(base + place)


def _symbols(library: bytes) -> dict[str, int]:
    """Where what a library for this machine (ELF of 64 bits) defines lies in it, by name: what ``nm`` says in fifty times the time."""
    (sections,), (size, count) = _ELF_SECTIONS.unpack_from(library, 0x28), _ELF_COUNTS.unpack_from(library, 0x3A)
    headers = [_ELF_HEADER.unpack_from(library, sections + index * size) for index in range(count)]
    found: dict[str, int] = {}
    for _, kind, _, _, offset, nbytes, names, _, _, _ in headers:
        if kind == _ELF_SYMBOLS:
            texts = headers[names][4]
            for name, _, _, section, place, _ in _ELF_SYMBOL.iter_unpack(library[offset : offset + nbytes]):
                if name and section:
                    start = texts + name
                    found[library[start : library.index(b"\0", start)].decode()] = place
    return found


def _with_source_lines(message: str, library: Path) -> str:
    """Replace module offsets by file and line where addr2line is installed."""
    found = _CODE_ADDRESS.search(message)
    tool = shutil.which("addr2line")
    if not found or not tool:
        return message
    try:
        command = [tool, "-i", "-e", str(library), f"0x{found.group(1)}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return message
    frames = [line.split(" ")[0].rsplit("/", 1)[-1] for line in done.stdout.splitlines()]
    frames = [frame for frame in frames if not frame.startswith(("?", "shim", "interface.h", "unit.cpp"))]
    if not frames:
        return message
    return _CODE_ADDRESS.sub(f" [{', called at '.join(frames)}]", message)
