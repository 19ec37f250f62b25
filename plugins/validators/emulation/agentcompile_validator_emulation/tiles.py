"""Launch arguments of the kind ``tiles``: what the emulator's copy engine knows of a view of an operand, in place of a CUtensorMap."""

import ctypes

from agentcompile_core.plugin_api import BuildError, DType, KernelArgument, StepSource, Tiling, UsageError

from .module import MOST_AXES, Buffer, Tiles

ALIGNMENT = 64  # bytes, of the argument
CHUNK = 16  # bytes: steps and the lines of tiles are multiples of it
NAME_BYTES = 23  # of an argument, in messages
LONGEST = 256  # elements of a tile along an axis


def check_tiles(source: StepSource) -> None:
    """Raises BuildError where ``source`` fetches tiles that the emulator does not."""
    for argument in (argument for launch in source.launches for argument in launch.arguments if argument.tiling is not None):
        if len(argument.tiling.extents) > MOST_AXES:
            raise BuildError(f"the emulator fetches tiles of at most {MOST_AXES} axes, not of {len(argument.tiling.extents)} "
                             f"({argument.name}); such a source is validated on a GPU only")


def tiles_of(argument: KernelArgument, operand: Buffer) -> Tiles:
    """What a launch passes for ``argument``, whose operand lies in ``operand``; it is only read.

    Raises:
        UsageError: no device takes such tiles, or the emulator does not.
    """
    tiling, dtype = argument.tiling, argument.dtype
    assert tiling is not None and dtype is not None  # checked with the source
    address, axes = operand.address + tiling.offset * dtype.bytes, len(tiling.extents)
    problem = _problem(tiling, dtype, address)
    if problem:
        raise UsageError(f"tiles of {argument.name}: {problem}")
    room = (ctypes.c_char * (ctypes.sizeof(Tiles) + ALIGNMENT))()
    made = Tiles.from_buffer(room, -ctypes.addressof(room) % ALIGNMENT)
    made.address, made.axes, made.element_bytes, made.swizzle_bytes = address, axes, dtype.bytes, tiling.swizzle
    for axis in range(axes):
        made.extents[axis], made.tile[axis], made.steps[axis] = tiling.extents[axis], tiling.tile[axis], tiling.steps[axis] * dtype.bytes
    made.operand, made.operand_address, made.operand_bytes = operand, operand.address, operand.nbytes
    made.name = argument.name.encode()[:NAME_BYTES]
    return made


def _problem(tiling: Tiling, dtype: DType, address: int) -> str:
    """Why ``cuTensorMapEncodeTiled``, or the emulator, refuses it."""
    line = tiling.tile[0] * dtype.bytes
    if len(tiling.extents) > MOST_AXES:
        return f"{len(tiling.extents)} axes; at most {MOST_AXES} are emulated"
    if address % CHUNK or any(step * dtype.bytes % CHUNK for step in tiling.steps[1:]):
        return f"address {address:#x} and steps {tiling.steps[1:]} of {dtype.bytes} bytes must be multiples of {CHUNK} bytes"
    if line % CHUNK or max(tiling.tile) > LONGEST:
        return f"a tile {tiling.tile}: lines are multiples of {CHUNK} bytes, axes at most {LONGEST} elements"
    if tiling.swizzle and line != tiling.swizzle:  # a device takes shorter ones, too
        return f"lines of {line} bytes swizzled by {tiling.swizzle}: only lines of as many are emulated"
    return ""


__all__ = ["check_tiles", "tiles_of"]
