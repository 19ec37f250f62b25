"""Schedules of experts_stream.cu: the shape of a stage, the ring, and how much of it is on its way."""

import math
from collections import Counter
from collections.abc import Iterator

from agentcompile_cuda_kit.needs import FEW_BLOCKS, SHARED, SHARED_RESERVED_PER_BLOCK

from agentcompile_core.plugin_api import Feature, Schedule, Target

from .space import GRID_LIMIT, WARP_SIZE, Shape

PATH = "stream"
SIZES = ("warps", "rows", "columns", "stages", "in_flight", "blocks_per_sm")
ORDERS = ("early_experts", "late_dependents")  # of sums, and of all others
MOST_STREAM_POINTS, BOTH_WAYS = 48, 12
STATIC_SHARED_BYTES = 256  # barriers of the kernel, rounded up
SMALLEST_STAGE_BYTES, USUAL_COPY_BYTES = 4 << 10, 2 << 10
# Little's law: 4.8 TB/s over 132 SMs are 36 KB per SM and microsecond, and a loaded memory answers in about one. Twice that and more
# hides that copies come in stages; nothing is prefetched for the next kernel, so deeper requests delay nobody.
IN_FLIGHT_BYTES_PER_SM = 80 << 10
LONG_BYTES_PER_SM = 32 << 10  # a share below what is in flight anyway does not stream
NO_BULK_COPIES = "bulk copies move 16 bytes, and rows are no multiple of that"
TOO_MANY_ROWS = "more rows per block than it has threads to finish them"
BEYOND_32_BITS = "more rows than 32 bits count"
TWO_FIT = "two of its blocks would fit where one is meant"
SMALL_COPIES = "its copies are too small"


def schedules(shape: Shape, target: Target) -> tuple[Schedule, ...]:
    """The best legal schedules, best guess first; none where the target has no bulk copies.

    A sum may know its experts early, and what is no sum may let its dependents wait until they can. The twelve best guesses are there so
    and without, side by side, so that a search of ten schedules has met the first of them both ways: alone the one gains what it waits for
    otherwise, the other loses nothing, and what they are worth behind each other is for the chain, which needs both. All others are there
    in the new order alone, so that as many shapes of stages and rings are left as fit.
    """
    if not _has_bulk_copies(target):
        return ()
    found = [schedule for schedule in _enumerate(shape) if not problem(shape, schedule, target)]
    best = sorted(found, key=lambda schedule: _badness(shape, schedule, target))[:MOST_STREAM_POINTS]
    if not target.has(Feature.GRIDDEPCONTROL):
        return tuple(best)
    order = ORDERS[0] if shape.summed else ORDERS[1]
    ordered = [Schedule({**dict(schedule.items), order: True}) for schedule in best]
    both = [point for pair in zip(ordered[:BOTH_WAYS], best, strict=False) for point in pair]
    return (*both, *ordered[BOTH_WAYS:])[:MOST_STREAM_POINTS]


def ruled_out(shape: Shape, target: Target) -> tuple[tuple[str, int], ...]:
    """How many schedules are not legal, by the reason; none where the target has no bulk copies."""
    if not _has_bulk_copies(target):
        return ()
    return tuple(sorted(Counter(why for schedule in _enumerate(shape) if (why := problem(shape, schedule, target))).items()))


def comes_first(shape: Shape, target: Target) -> bool:
    """Whether an SM's share of the chosen rows is longer than what it has in flight."""
    return _weight_bytes(shape) >= target.sm_count * LONG_BYTES_PER_SM


def stage_bytes(shape: Shape, schedule: Schedule) -> int:
    """Bytes of one slot of the ring."""
    return _stage_rows(schedule) * shape.pair * schedule.integer("columns") * shape.element_bytes


def grid_of(shape: Shape, schedule: Schedule, target: Target) -> tuple[int, int, int]:
    """As many blocks as stay on the SMs, and never more than give each of a block's warps a row of a slot."""
    enough = -(-shape.n * shape.slots // schedule.integer("warps"))
    return min(target.sm_count * schedule.integer("blocks_per_sm"), _rows(shape), enough), 1, 1


def shared_bytes(shape: Shape, schedule: Schedule, target: Target) -> int:
    """Dynamic shared memory: the ring, the rows of x that a block reads, and a sum per row and slot where these are summed."""
    share = -(-_rows(shape) // grid_of(shape, schedule, target)[0])
    slots = 1 if shape.shared else shape.slots if shape.summed else min(shape.slots, (share + shape.n - 2) // shape.n + 1)
    kept = 4 * share * shape.slots if shape.summed else 0
    return schedule.integer("stages") * stage_bytes(shape, schedule) + slots * shape.k * shape.element_bytes + kept


def reduction_depth(shape: Shape) -> int:
    """Additions behind each other: a lane's terms, the lanes, the bias and the slots."""
    width = WARP_SIZE * shape.vector
    return -(-shape.k // width) * shape.vector + 5 + 1 + shape.slots_of_block


def problem(shape: Shape, schedule: Schedule, target: Target) -> str:
    """Why a schedule does not fit the rows or the SM, or leaves too much of it; empty: it is legal."""
    if not shape.vectorized:
        return NO_BULK_COPIES
    if _rows(shape) * shape.pair * (shape.slots if shape.summed else 1) > GRID_LIMIT:
        return BEYOND_32_BITS
    resident = schedule.integer("blocks_per_sm")
    if shape.summed and -(-shape.n // grid_of(shape, schedule, target)[0]) > schedule.integer("warps") * WARP_SIZE:
        return TOO_MANY_ROWS
    shared = shared_bytes(shape, schedule, target) + STATIC_SHARED_BYTES
    if shared > target.shared_bytes_per_block:
        return SHARED
    if resident * (shared + SHARED_RESERVED_PER_BLOCK) > target.shared_bytes_per_sm:
        return FEW_BLOCKS
    # The block scheduler may fill an SM before it takes the next: a grid of one block per SM must not fit twice.
    if resident == 1 and 2 * (shared + SHARED_RESERVED_PER_BLOCK) <= target.shared_bytes_per_sm:
        return TWO_FIT
    return SMALL_COPIES if stage_bytes(shape, schedule) < SMALLEST_STAGE_BYTES else ""


def stream_schedule(*, warps: int, rows: int, columns: int, stages: int, in_flight: int, blocks_per_sm: int, order: str = "") -> Schedule:
    """One schedule of this path; ``order``: one of ORDERS, or none of them."""
    return Schedule({"path": PATH, "warps": warps, "rows": rows, "columns": columns, "stages": stages, "in_flight": in_flight,
                     "blocks_per_sm": blocks_per_sm, **{name: name == order for name in ORDERS}})


def _has_bulk_copies(target: Target) -> bool:
    return target.has(Feature.BULK_COPY) and target.has(Feature.MBARRIER)


def _rows(shape: Shape) -> int:
    """Rows that blocks share: of all slots, or of n where each block takes every slot."""
    return shape.n if shape.summed else shape.n * shape.slots


def _stage_rows(schedule: Schedule) -> int:
    return schedule.integer("warps") * schedule.integer("rows")


def _weight_bytes(shape: Shape) -> int:
    return shape.slots * shape.n * shape.pair * shape.k * shape.element_bytes


def _column_choices(shape: Shape) -> tuple[int, ...]:
    """Rows in one to sixteen parts, as even as what a warp reads in one step allows: no length leaves a small rest."""
    step = WARP_SIZE * shape.vector
    return tuple(dict.fromkeys(-(-shape.k // (parts * step)) * step for parts in (1, 2, 4, 8, 16)))


def _enumerate(shape: Shape) -> Iterator[Schedule]:
    for columns in _column_choices(shape):
        for warps, rows in ((8, 1), (4, 1), (8, 2), (4, 2)):
            for stages in (2, 3, 4, 5, 6, 8):
                for in_flight in sorted({stages // 2, stages - 1, stages}):
                    for blocks_per_sm in (2, 1):
                        yield stream_schedule(warps=warps, rows=rows, columns=columns, stages=stages, in_flight=in_flight,
                                              blocks_per_sm=blocks_per_sm)


def _badness(shape: Shape, schedule: Schedule, target: Target) -> float:
    """Distance from what Little's law asks for; small copies, few stages, and rings that let a third block or no other kernel in, cost."""
    blocks, resident = grid_of(shape, schedule, target)[0], schedule.integer("blocks_per_sm")
    stage, columns = stage_bytes(shape, schedule), schedule.integer("columns")
    share = _weight_bytes(shape) / target.sm_count
    # A stage that is on its way is half there: so much is in flight on average.
    flight = (schedule.integer("in_flight") - 0.5) * stage * blocks / target.sm_count
    badness = abs(math.log2(flight / min(IN_FLIGHT_BYTES_PER_SM, target.shared_bytes_per_sm / 2.5, max(share, stage))))
    rest = schedule.integer("stages") - schedule.integer("in_flight")
    badness += 0.1 if rest == 0 else 0.15 * (rest - 1)  # one stage is read while the others come
    whole = shape.k <= columns
    together = min(_stage_rows(schedule), shape.n) if whole else 1
    badness += 0.5 * max(0.0, math.log2(USUAL_COPY_BYTES / (together * min(columns, shape.k) * shape.element_bytes)))
    badness += 2.0 * (-(-shape.k // columns) * columns / shape.k - 1.0) if not whole else 0.0
    badness += 0.2 * max(0.0, 4.0 - share / (resident * stage)) + _crowding(shape, schedule, target)
    return badness + (0.0 if resident == 2 else 0.3) + (0.0 if schedule.integer("warps") == 8 else 0.05)


def _crowding(shape: Shape, schedule: Schedule, target: Target) -> float:
    """Blocks of the next kernel wait beside these if these leave half the SM; else one takes the place of one, unless a third fits in."""
    block = shared_bytes(shape, schedule, target) + STATIC_SHARED_BYTES + SHARED_RESERVED_PER_BLOCK
    resident = schedule.integer("blocks_per_sm")
    if 2 * resident * block <= target.shared_bytes_per_sm:
        return 0.0
    return 0.1 if (resident + 1) * block > target.shared_bytes_per_sm else 0.3
