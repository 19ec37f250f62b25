"""Schedules of experts.cu: warps, rows and vectors in flight, and how many turns a warp takes in its block's tile."""

import math
from collections.abc import Iterator

from attrs import frozen

from agentcompile_core.plugin_api import Feature, Match, Schedule, Target

WARP_SIZE, VECTOR_BYTES = 32, 16
MOST_SLOTS = 32
MOST_POINTS = 96
# Registers per thread of a batch of 16-byte vectors, measured with nvcc 13 over all paths.
REGISTERS_FOR_BATCH = ((2, 64), (4, 80), (8, 112))
IN_FLIGHT_BYTES_PER_SM = 64 << 10
STATIC_SHARED_BYTES = 1024
GRID_LIMIT = 2**31 - 1


@frozen(kw_only=True)
class Shape:
    """The sizes of a match, in elements."""

    n: int
    k: int
    pair: int
    slots: int
    summed: bool
    element_bytes: int
    shared: bool = False  # all slots read one row of x

    @property
    def vector(self) -> int:
        """Elements of a 16-byte vector."""
        return VECTOR_BYTES // self.element_bytes

    @property
    def vectorized(self) -> bool:
        """Whether every row begins at a multiple of 16 bytes where its matrix does."""
        return self.k % self.vector == 0

    @property
    def slots_of_block(self) -> int:
        """Slots that one block computes: all where they are summed."""
        return self.slots if self.summed else 1


def shape_of(match: Match) -> Shape:
    """The sizes of a match."""
    return Shape(n=match.integer("n"), k=match.integer("k"), pair=match.integer("pair", 1), slots=match.integer("slots"),
                 summed=match.flag("summed"), element_bytes=match.need("weight").spec.dtype.bytes, shared=match.flag("shared"))


def tile_of(shape: Shape, schedule: Schedule) -> int:
    """Rows of a block: every warp has ``turns`` tasks, over all slots of the block."""
    tasks = schedule.integer("warps") * schedule.integer("turns")
    return schedule.integer("rows") * -(-tasks // shape.slots_of_block)


def grid_of(shape: Shape, schedule: Schedule) -> tuple[int, int, int]:
    """Tiles of rows, and slots where each has blocks of its own."""
    return -(-shape.n // tile_of(shape, schedule)), 1 if shape.summed else shape.slots, 1


def shared_bytes(shape: Shape, schedule: Schedule) -> int:
    """Dynamic shared memory: a sum per row, pair and slot of the block."""
    return 4 * shape.slots_of_block * shape.pair * min(tile_of(shape, schedule), shape.n)


def schedules(shape: Shape, target: Target) -> tuple[Schedule, ...]:
    """All legal schedules, best guess first."""
    found = [schedule for schedule in _enumerate() if _is_legal(shape, schedule, target)]
    return tuple(sorted(found, key=lambda schedule: _badness(shape, schedule, target)))[:MOST_POINTS]


def _enumerate() -> Iterator[Schedule]:
    for warps in (8, 4):
        for rows in (1, 2, 4):
            for unroll in (1, 2, 4, 8):
                for turns in (1, 2, 4, 8):
                    yield Schedule({"warps": warps, "rows": rows, "unroll": unroll, "turns": turns})


def _batch(shape: Shape, schedule: Schedule) -> int:
    """16-byte vectors in flight per thread."""
    return schedule.integer("rows") * shape.pair * schedule.integer("unroll")


def registers(shape: Shape, schedule: Schedule) -> int:
    """Registers per thread that hold a schedule's batch."""
    return next((held for size, held in REGISTERS_FOR_BATCH if size >= _batch(shape, schedule)), REGISTERS_FOR_BATCH[-1][1])


def _padded(shape: Shape, schedule: Schedule) -> int:
    width = schedule.integer("unroll") * WARP_SIZE * (shape.vector if shape.vectorized else 1)
    return -(-shape.k // width) * width


def _is_legal(shape: Shape, schedule: Schedule, target: Target) -> bool:
    """Whether its batch fits into registers, and it wastes neither most lanes nor most rows; the plainest always is."""
    if schedule.integer("unroll") * schedule.integer("rows") * schedule.integer("turns") == 1:
        return True
    fits_row = _padded(shape, schedule) <= 1.5 * shape.k or schedule.integer("unroll") == 1
    small = tile_of(shape, schedule) <= max(shape.n, schedule.integer("rows") * 2)
    fits_shared = shared_bytes(shape, schedule) + STATIC_SHARED_BYTES <= min(target.shared_bytes_per_block, 48 << 10)
    return 2 <= _batch(shape, schedule) <= REGISTERS_FOR_BATCH[-1][0] and fits_row and small and fits_shared


def _badness(shape: Shape, schedule: Schedule, target: Target) -> float:
    """An SM likes 64 KB in flight; a last wave that is nearly empty, idle lanes and blocks of few turns cost."""
    threads = schedule.integer("warps") * WARP_SIZE
    batch = _batch(shape, schedule)
    blocks = math.prod(grid_of(shape, schedule))
    fit = min(target.registers_per_sm // (threads * registers(shape, schedule)), target.threads_per_sm // threads)
    # Under programmatic dependent launch the blocks of the next kernel wait beside these.
    resident = max(1, fit // 2 if target.has(Feature.GRIDDEPCONTROL) else fit)
    waves = blocks / (target.sm_count * resident)
    flight = min(resident, blocks / target.sm_count) * threads * batch * VECTOR_BYTES
    badness = abs(math.log2(flight / IN_FLIGHT_BYTES_PER_SM)) + 2.0 * (math.ceil(waves) / waves - 1.0 if waves > 1.0 else 0.0)
    tile = tile_of(shape, schedule)
    badness += 3.0 * (grid_of(shape, schedule)[0] * tile / shape.n - 1.0)
    badness += 2.0 * (1.0 - shape.k / _padded(shape, schedule))
    return badness + (0.0 if schedule.integer("warps") == 8 else 0.2) - 0.01 * schedule.integer("turns")
