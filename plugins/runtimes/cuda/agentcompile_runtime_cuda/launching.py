"""Loaded kernels and prepared launches."""

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

from agentcompile_core.plugin_api import ArgumentKind, ContractError, KernelArgument, Launch

from . import driver as cu

PORTABLE_CLUSTER = 8
LAYOUTS = 4096  # kept at most
_Layout = tuple[struct.Struct, tuple[int, ...]]
_layouts: dict[int, tuple[tuple[KernelArgument, ...], _Layout]] = {}  # by id of the arguments, which are kept so that it stays theirs
CELL_BYTES = 8  # every argument has as many, wherever it needs fewer
# As ``struct`` writes them; a tensor map has a place of its own, and an empty cell here.
_FORMATS = {ArgumentKind.POINTER: "Q", ArgumentKind.I32: "i4x", ArgumentKind.I64: "q", ArgumentKind.F32: "f4x", ArgumentKind.TILES: "Q"}
_RANGES = {ArgumentKind.POINTER: (0, 2**64), ArgumentKind.TILES: (0, 2**64),
           ArgumentKind.I32: (-(2**31), 2**31), ArgumentKind.I64: (-(2**63), 2**63)}


class LoadedKernel:
    """A binary in the context of one device. Stays loaded as long as the process lives."""

    def __init__(self, driver: cu.Driver, binary: bytes, sha256: str) -> None:
        self.driver = driver
        self.sha256 = sha256
        self._module = driver.load_module(binary)
        self._functions: dict[str, int] = {}
        self._shared: dict[str, int] = {}

    def function(self, launch: Launch) -> int:
        """The CUfunction of a launch, with the attributes that its shared memory and cluster need."""
        entry = launch.entry
        if entry not in self._functions:
            self._functions[entry] = self.driver.function(self._module, entry)
        function = self._functions[entry]
        # Asked for at any size, since 48 KB hold what the kernel declares itself too. Only ever raised: two launches of one
        # entry may want different sizes.
        if launch.shared_bytes > self._shared.get(entry, 0):
            self.driver.set_attribute(function, cu.MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared_bytes)
            self._shared[entry] = launch.shared_bytes
        if launch.cluster > PORTABLE_CLUSTER:
            self.driver.set_attribute(function, cu.NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        return function

    def symbol(self, name: str) -> bytes:
        """What a variable of the binary holds."""
        return self.driver.read_symbol(self._module, name)


def pack(arguments: tuple[KernelArgument, ...], values: Sequence[int | float], driver: cu.Driver) -> tuple[Any, list[object]]:
    """The ``void**`` of a launch and the objects it points to, which must be kept alive.

    Raises:
        ContractError: the count differs, or a value does not fit its type.
        CudaError: the driver makes no tensor map of a tiling.
    """
    if len(arguments) != len(values):
        raise ContractError(f"a launch has {len(arguments)} arguments and was given {len(values)} values")
    count, (layout, tiled) = len(arguments), _layout(arguments)
    cells = (ctypes.c_char * (CELL_BYTES * max(1, count)))()
    try:
        layout.pack_into(cells, 0, *values)
    except (struct.error, OverflowError, TypeError):  # integers that are floats, or what does not fit
        layout.pack_into(cells, 0, *[_number(argument, value) for argument, value in zip(arguments, values, strict=True)])
    kept: list[object] = [cells]
    base = ctypes.addressof(cells)
    addresses = (ctypes.c_void_p * max(1, count))(*range(base, base + CELL_BYTES * count, CELL_BYTES))
    for index in tiled:
        kept.append(_tiles(arguments[index], int(values[index]), driver))
        addresses[index] = ctypes.addressof(kept[-1])  # type: ignore[arg-type]
    return addresses, kept


def _layout(arguments: tuple[KernelArgument, ...]) -> _Layout:
    """How cells are written, and the places of tiles: looked up by identity, since a model has thousands of launches of few kinds."""
    known = _layouts.get(id(arguments))
    if known is not None and known[0] is arguments:
        return known[1]
    if len(_layouts) >= LAYOUTS:
        _layouts.clear()
    made = (struct.Struct("<" + "".join(_FORMATS[argument.kind] for argument in arguments)),
            tuple(index for index, argument in enumerate(arguments) if argument.kind is ArgumentKind.TILES))
    _layouts[id(arguments)] = arguments, made
    return made


def configure(launch: Launch, pdl: bool) -> tuple[cu.Config, object]:
    """The launch configuration, stream 0, and the attribute array it points to, which must be kept alive."""
    attributes = []
    if launch.cluster > 1:
        attributes.append(cu.Attribute(id=cu.CLUSTER_DIMENSION))
        attributes[-1].value.cluster[:] = [launch.cluster, 1, 1]
    if pdl:
        attributes.append(cu.Attribute(id=cu.PROGRAMMATIC_STREAM_SERIALIZATION))
        attributes[-1].value.programmatic = 1
    array = (cu.Attribute * max(1, len(attributes)))(*attributes)
    (gx, gy, gz), (bx, by, bz) = launch.grid, launch.block
    config = cu.Config(grid_x=gx, grid_y=gy, grid_z=gz, block_x=bx, block_y=by, block_z=bz,
                       shared_bytes=launch.shared_bytes, attribute_count=len(attributes))
    config.attributes = ctypes.cast(array, ctypes.POINTER(cu.Attribute))
    return config, array


def prepare(kernel: LoadedKernel, launch: Launch, values: Sequence[int | float], pdl: bool,
            places: Sequence[int] = ()) -> Callable[..., None]:
    """``run(stream, *addresses)`` for one launch: enqueue it on a CUstream. Not for two threads at once.

    ``addresses`` are those of the pointers number ``places``, in that order; the driver copies arguments as it enqueues.
    """
    arguments, cells = pack(launch.arguments, values, kernel.driver)
    config, attributes = configure(launch, pdl and launch.pdl)
    function = ctypes.c_void_p(kernel.function(launch))
    enqueue, reference, entry = kernel.driver.launch, ctypes.byref(config), launch.entry
    keep = (kernel, cells, attributes)  # what the structures point to lives as long as ``run``
    moving = (ctypes.c_uint64 * len(places))(*(int(values[place]) for place in places))  # side by side: written at once
    for index, place in enumerate(places):
        arguments[place] = ctypes.addressof(moving) + index * ctypes.sizeof(ctypes.c_uint64)

    def run(stream: int, *addresses: int) -> None:
        if addresses:
            moving[:] = addresses
        config.stream = stream
        code = enqueue(reference, function, arguments, None)
        if code:
            keep[0].driver.check(f"launching {entry}", code)

    return run


def _number(argument: KernelArgument, value: int | float) -> int | float:
    kind = argument.kind
    if kind is ArgumentKind.F32:
        return ctypes.c_float(value).value  # infinite beyond the largest
    low, high = _RANGES[kind]
    if int(value) != value or not low <= value < high:
        raise ContractError(f"argument {argument.name!r} is {kind.value} and was given {value!r}")
    return int(value)


def _tiles(argument: KernelArgument, address: int, driver: cu.Driver) -> object:
    if argument.tiling is None or argument.dtype not in cu.TENSOR_MAP_TYPES:
        elements = argument.dtype.value if argument.dtype else "nothing"
        raise ContractError(f"argument {argument.name!r} is tiles of {elements} with the tiling {argument.tiling}")
    return driver.tensor_map(address, argument.dtype, argument.tiling)
