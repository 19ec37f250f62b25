"""Schedules of experts_columns.cu: how much of a row a block reads, by how many lanes, warps and rows in flight."""

import math

from agentcompile_core.plugin_api import Schedule, Target

from .space import STATIC_SHARED_BYTES, WARP_SIZE, Shape

IN_FLIGHT_BYTES_PER_SM = 48 << 10


def width_of(shape: Shape, interleaved: bool) -> int:
    """Elements of a row of the matrix that the grid deals out: of one half of a pair, or of both where they are interleaved."""
    return shape.n * (2 if interleaved else 1)


def tile_of(shape: Shape, schedule: Schedule) -> int:
    """Elements of a row that a block reads: a 16-byte vector per lane."""
    return schedule.integer("lanes") * shape.vector


def shared_bytes(shape: Shape, schedule: Schedule, interleaved: bool) -> int:
    """Dynamic shared memory: a sum per slot, warp and element of the tile."""
    streams = 2 if shape.pair == 2 and not interleaved else 1
    return 4 * shape.slots_of_block * schedule.integer("warps") * streams * tile_of(shape, schedule)


def is_vectorized(shape: Shape) -> bool:
    """Whether each half of each row begins at a multiple of 16 bytes where its matrix does."""
    return shape.n % shape.vector == 0


def schedules(shape: Shape, interleaved: bool, target: Target) -> tuple[Schedule, ...]:
    """All legal schedules, best guess first."""
    found = [Schedule({"lanes": lanes, "warps": warps, "unroll": unroll})
             for lanes in (32, 16, 8, 4) for warps in (8, 16, 4) for unroll in (4, 2, 8, 1)]
    legal = [point for point in found if _is_legal(shape, point, interleaved)] or [Schedule({"lanes": 4, "warps": 4, "unroll": 1})]
    return tuple(sorted(legal, key=lambda point: _badness(shape, point, interleaved, target)))


def _is_legal(shape: Shape, point: Schedule, interleaved: bool) -> bool:
    streams = 2 if shape.pair == 2 and not interleaved else 1
    threads = point.integer("warps") * WARP_SIZE
    finished = tile_of(shape, point) <= threads * (2 if interleaved else 1)
    held = point.integer("unroll") * streams <= 8 and shared_bytes(shape, point, interleaved) + STATIC_SHARED_BYTES <= 48 << 10
    return finished and held


def _badness(shape: Shape, point: Schedule, interleaved: bool, target: Target) -> float:
    """Enough blocks for every SM and enough in flight; whole segments of memory; tiles that end where the row ends."""
    tile, threads = tile_of(shape, point), point.integer("warps") * WARP_SIZE
    tiles = -(-width_of(shape, interleaved) // tile)
    blocks = tiles * (1 if shape.summed else shape.slots)
    resident = min(blocks / target.sm_count, 2048 / threads / 2)
    flight = max(resident, 0.01) * threads * point.integer("unroll") * 16
    badness = abs(math.log2(flight / IN_FLIGHT_BYTES_PER_SM)) + 2.0 * (tiles * tile / width_of(shape, interleaved) - 1.0)
    idle = max(0.0, 1.0 - blocks / target.sm_count)
    return badness + 3.0 * idle + (0.0 if point.integer("lanes") >= 8 else 0.5)
