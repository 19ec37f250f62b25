"""Schedules of experts_columns.cu: how much of a row a block reads, by how many lanes, warps, rows in flight and blocks of a tile."""

import math

from agentcompile_core.plugin_api import Feature, Schedule, Target

from .space import STATIC_SHARED_BYTES, WARP_SIZE, Shape

IN_FLIGHT_BYTES_PER_SM = 88 << 10
REGISTERS = 72  # of a thread that loads four vectors at once, measured with nvcc 13
MOST_LOADED = 4  # vectors that a thread loads at once, while as many are added up: two times eight do not fit its registers
SPLITS = (1, 2, 4, 8)
MOST_POINTS = 96


def width_of(shape: Shape, interleaved: bool) -> int:
    """Elements of a row of the matrix that the grid deals out: of one half of a pair, or of both where they are interleaved."""
    return shape.n * (2 if interleaved else 1)


def tile_of(shape: Shape, schedule: Schedule) -> int:
    """Elements of a row that a block reads: a 16-byte vector per lane."""
    return schedule.integer("lanes") * shape.vector


def shared_bytes(shape: Shape, schedule: Schedule, interleaved: bool) -> int:
    """Dynamic shared memory: a sum per warp and element of the tile, and where it is split one per block and element."""
    streams, split = 2 if shape.pair == 2 and not interleaved else 1, schedule.integer("split")
    return 4 * (schedule.integer("warps") + (split if split > 1 else 0)) * streams * tile_of(shape, schedule)


def is_vectorized(shape: Shape) -> bool:
    """Whether each half of each row begins at a multiple of 16 bytes where its matrix does."""
    return shape.n % shape.vector == 0


def schedules(shape: Shape, interleaved: bool, target: Target) -> tuple[Schedule, ...]:
    """All legal schedules, best guess first."""
    found = [Schedule({"lanes": lanes, "warps": warps, "unroll": unroll, "split": split})
             for lanes in (32, 16, 8, 4) for warps in (8, 16, 4) for unroll in (4, 2, 1)
             for split in (SPLITS if target.has(Feature.CLUSTER) else SPLITS[:1])]
    least = Schedule({"lanes": 4, "warps": 4, "unroll": 1, "split": 1})
    legal = [point for point in found if _is_legal(shape, point, interleaved)] or [least]
    return tuple(sorted(legal, key=lambda point: _badness(shape, point, interleaved, target))[:MOST_POINTS])


def _is_legal(shape: Shape, point: Schedule, interleaved: bool) -> bool:
    """Whether a thread finishes one output at most, batch and sums fit, and a row's blocks are no more than what there is to load.

    A block's groups of lanes deal out the rows of all of its slots, so these count together; where a share of them is no batch for each
    group, more blocks only add sums that they send each other.
    """
    streams = 2 if shape.pair == 2 and not interleaved else 1
    threads = point.integer("warps") * WARP_SIZE
    finished = tile_of(shape, point) <= threads * (2 if interleaved else 1)
    held = point.integer("unroll") * streams <= MOST_LOADED and shared_bytes(shape, point, interleaved) + STATIC_SHARED_BYTES <= 48 << 10
    groups, split = threads // point.integer("lanes"), point.integer("split")
    dealt = shape.slots_of_block * (shape.k // split) >= groups * point.integer("unroll")
    return finished and held and (dealt or split == 1)


def _badness(shape: Shape, point: Schedule, interleaved: bool, target: Target) -> float:
    """All blocks at once, as many as fit, and enough in flight; whole segments of memory; tiles that end where the row ends.

    Measured on an H100 with gpt-oss's layers: 360 blocks of 256 threads, of which three fit on an SM, win for both; one wave more costs a
    twentieth of the longer one, and half of the blocks a third of the shorter one.
    """
    tile, threads = tile_of(shape, point), point.integer("warps") * WARP_SIZE
    tiles = -(-width_of(shape, interleaved) // tile)
    share = tiles * point.integer("split") * (1 if shape.summed else shape.slots) / target.sm_count
    held = max(1, min(target.threads_per_sm // threads, target.registers_per_sm // (threads * REGISTERS)))
    waves = share / held
    unused = 1.0 - waves if waves <= 1.0 else 0.5 + math.ceil(waves) / waves - 1.0
    flight = min(held, share) * threads * point.integer("unroll") * 2 * 16
    padded = tiles * tile / width_of(shape, interleaved) - 1.0
    badness = 2.0 * unused + 0.5 * abs(math.log2(flight / IN_FLIGHT_BYTES_PER_SM)) + 2.0 * padded
    return badness + (0.0 if point.integer("lanes") >= 8 else 0.5) + 0.02 * point.integer("split")
