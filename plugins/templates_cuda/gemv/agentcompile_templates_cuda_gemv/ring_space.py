"""Schedules of gemv_ring.cu and gemv_tensor.cu: ring size, stage shape and the cap on what is in flight."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import product, zip_longest

from agentcompile_cuda_kit.needs import FEW_BLOCKS, SHARED, SHARED_RESERVED_PER_BLOCK

from agentcompile_core.plugin_api import Feature, Schedule, Target

from .shape import WARP_SIZE, Shape, ceil_div

LARGEST_RING_BYTES = 96 << 10
USUAL_RING_BYTES = 64 << 10
SMALLEST_STAGE_BYTES = 4 << 10
WARPS, OTHER_WARPS = 8, (6, 7, 9, 10, 11, 12)  # consumers of a block, and those that may deal rows out more evenly
# Of two rows at a time fewer warps have as many bytes in hand: Qwen3-1.7B's chain at 256 positions, H200, 710 us with 4 warps and slots
# of 16 KB where 8 with slots of 32 take 720; of one row they lose 0.3 to 2.5 %.
PAIRED_WARPS = 4
ROWS, STAGES = (1, 2), (1, 2, 3, 4, 6)
EVENER = 0.05  # by how much less of a round they must waste: 2304 rows are 9 for each of 256 blocks
IN_FLIGHT_BYTES = (16 << 10, 64 << 10)  # least and most per block; deeper requests only delay the next kernel's input
STATIC_GROUPS = "static_groups"
MOST_DEALT = 4  # schedules of a match that are offered with dealt rows too
LEAST_DEALT = 0.15  # of a matrix's groups of rows: less evens nothing out
STATIC_SHARED_BYTES = 512  # barriers and reduction scratch of the kernel, rounded up
PATHS = ("ring", "tensor")  # by FMA, by tensor cores
TENSOR_ROWS = 8  # of an instruction
TENSOR_BYTES = 2  # of an element
# Of a thread, by how many matrices there are, where a slot has few rows: about as by FMA, since the kernels in front and behind want to be
# on the SM too. The compiler takes 72 to 102 if it may, and spills with fewer.
TENSOR_REGISTERS = {1: 56, 2: 72}
FEW_INSTRUCTIONS, FEW_COLUMNS = 2, 1024  # of all rows of a slot, and of it: with more the sums and what is read ahead need registers
MOST_POINTS, MOST_FMA, MOST_TENSOR = 120, 90, 30
EARLY_TENSOR = 1  # schedules of a match that are offered for tensor cores behind the first two; others come last


@lru_cache(maxsize=256)
def ring_schedules(shape: Shape, target: Target) -> tuple[Schedule, ...]:
    """All legal ring schedules, best guess first; empty where the target or the row length rules the ring out."""
    if not target.has(Feature.BULK_COPY) or not shape.vectorized:
        return ()
    found = [schedule for schedule in _enumerate(shape, target) if not problem(shape, schedule, target)]
    ranked = sorted(found, key=lambda schedule: _badness(shape, schedule, target))
    # The best guess, then the best ones with another number of warps: how much an uneven last round costs differs.
    firsts = {schedule.integer("warps"): schedule for schedule in reversed(ranked)}
    leading = [schedule for schedule in ranked if firsts[schedule.integer("warps")] is schedule]
    others = [schedule for schedule in ranked if schedule not in leading]
    dealt = [point for schedule in ranked[:MOST_DEALT] for point in _dealt(shape, schedule, target)]
    turns = (point for pair in zip_longest(dealt, others) for point in pair if point is not None)
    return _with_tensor(shape, target, [*leading, *turns])[:MOST_POINTS]


def _with_tensor(shape: Shape, target: Target, points: list[Schedule]) -> tuple[Schedule, ...]:
    """The same schedules for tensor cores besides, where they take the type."""
    if shape.element_bytes != TENSOR_BYTES:
        return tuple(points)
    twins = (Schedule({**dict(point.items), "path": "tensor"}) for point in points[:MOST_TENSOR])
    legal = [twin for twin in twins if not problem(shape, twin, target)]
    early = [twin for twin in legal if twin.integer("warps") != PAIRED_WARPS][:EARLY_TENSOR]  # with 4 warps 1 to 2 % slower
    return (*points[:2], *early, *points[2:MOST_FMA], *(twin for twin in legal if twin not in early))


def static_groups(schedule: Schedule) -> int:
    """Groups of rows that each block begins with where the rest is dealt; 0: each block has all of its rows from the start."""
    return int(dict(schedule.items).get(STATIC_GROUPS, 0))


def room_by_registers(shape: Shape, schedule: Schedule, target: Target) -> int:
    """Blocks of its size, the neighbours' among them, that the registers of a block leave room for on an SM."""
    rows, threads = schedule.integer("warps") * schedule.integer("rows"), (schedule.integer("warps") + 1) * WARP_SIZE
    few = ceil_div(rows, TENSOR_ROWS) * shape.pair <= FEW_INSTRUCTIONS and schedule.integer("columns") <= FEW_COLUMNS
    room = target.registers_per_sm // (threads * TENSOR_REGISTERS[shape.pair]) if few and schedule["path"] == "tensor" else 1
    return max(schedule.integer("blocks_per_sm"), room)


def _dealt(shape: Shape, schedule: Schedule, target: Target) -> tuple[Schedule, ...]:
    """The schedule with rows that are dealt: what fills the ring from the start, the rest on demand; none where little would be left."""
    warps, columns = schedule.integer("warps"), schedule.integer("columns")
    groups, blocks = ceil_div(shape.n, warps * schedule.integer("rows")), shape.blocks(target, schedule.integer("blocks_per_sm"), warps)
    first = ceil_div(schedule.integer("stages"), ceil_div(shape.k, columns))
    if groups - blocks * first < LEAST_DEALT * groups:
        return ()
    return (Schedule({**dict(schedule.items), STATIC_GROUPS: first}),)


@lru_cache(maxsize=256)
def ruled_out(shape: Shape, target: Target) -> Counter[str]:
    """How many schedules are not legal, by the reason; none where there is no ring at all."""
    if not target.has(Feature.BULK_COPY) or not shape.vectorized:
        return Counter()
    return Counter(why for schedule in _enumerate(shape, target) if (why := problem(shape, schedule, target)))


def stage_bytes(shape: Shape, schedule: Schedule) -> int:
    """Bytes of one slot of the ring."""
    rows = schedule.integer("warps") * schedule.integer("rows") * shape.pair
    return rows * schedule.integer("columns") * shape.element_bytes


def ring_shared_bytes(shape: Shape, schedule: Schedule) -> int:
    """Dynamic shared memory: the ring, and the staged row behind it."""
    return schedule.integer("stages") * stage_bytes(shape, schedule) + shape.k * shape.element_bytes


def static_shared_bytes(shape: Shape, schedule: Schedule) -> int:
    """Static shared memory of a block, rounded up: with tensor cores, of two groups the sums of all rows by each warp."""
    if schedule["path"] != "tensor":
        return STATIC_SHARED_BYTES
    warps = schedule.integer("warps")
    rows = ceil_div(warps * schedule.integer("rows"), TENSOR_ROWS) * TENSOR_ROWS * shape.pair
    return STATIC_SHARED_BYTES + 2 * warps * rows * 4


def problem(shape: Shape, schedule: Schedule, target: Target) -> str:
    """Why the blocks that should share an SM do not fit on it, or leave too much of it; empty: it is legal."""
    shared = ring_shared_bytes(shape, schedule) + static_shared_bytes(shape, schedule)
    resident = schedule.integer("blocks_per_sm")
    fits = resident * (shared + SHARED_RESERVED_PER_BLOCK) <= target.shared_bytes_per_sm
    # The block scheduler fills an SM before it takes the next: a grid of one block per SM must not fit twice.
    crowded = (resident + 1) * (shared + SHARED_RESERVED_PER_BLOCK) > target.shared_bytes_per_sm or resident > 1
    if shared > target.shared_bytes_per_block:
        return SHARED
    if not fits:
        return FEW_BLOCKS
    if not crowded:
        return "two of its blocks would fit where one is meant"
    return "its copies are too small" if stage_bytes(shape, schedule) < SMALLEST_STAGE_BYTES else ""


def _column_choices(shape: Shape) -> tuple[int, ...]:
    """Columns per stage: whole rows where they are short, else slices; multiples of what a warp reads in one step."""
    step = WARP_SIZE * shape.vector
    whole = ceil_div(shape.k, step)
    slices = sorted({_even(whole, steps) * step for steps in (2, 4, 8) if steps < whole})
    return (*slices, whole * step) if whole <= 16 else tuple(slices)


def _even(whole: int, most: int) -> int:
    """Steps of one slice of at most ``most`` where slices of a row of ``whole`` steps fill their stages best: as many of them as there must
    be, or one more, which are longer than half of ``most``, since short copies cost their producer as much as long ones."""
    fewest = ceil_div(whole, most)
    lengths = [ceil_div(whole, fewest), *(length for length in (ceil_div(whole, fewest + 1),) if length > most // 2)]
    return min(lengths, key=lambda length: length * ceil_div(whole, length))


def _warp_choices(shape: Shape, target: Target) -> tuple[int, ...]:
    """Eight, of paired rows half as many too, and the number that wastes least of a round with two blocks on an SM, if that is clearly
    less."""
    def waste(warps: int) -> float:
        return shape.sm_waste(target, shape.blocks(target, 2, warps), warps)

    best = min(OTHER_WARPS, key=lambda warps: (waste(warps), abs(warps - WARPS)))
    return (WARPS, *[PAIRED_WARPS] * (shape.pair > 1), *[best] * (waste(best) <= waste(WARPS) - EVENER))


def _enumerate(shape: Shape, target: Target) -> Iterator[Schedule]:
    for warps, columns, rows, stages in product(_warp_choices(shape, target), _column_choices(shape), ROWS, STAGES):
        for in_flight, blocks_per_sm in product(sorted({1, min(2, stages), max(1, stages // 2), stages}), (2, 1)):
            if stages > 1 or _is_one_slot(shape, target, blocks_per_sm, warps * rows, columns):
                yield ring_schedule(rows=rows, columns=columns, stages=stages, in_flight=in_flight, blocks_per_sm=blocks_per_sm,
                                    warps=warps)


def _is_one_slot(shape: Shape, target: Target, blocks_per_sm: int, rows: int, columns: int) -> bool:
    """Whether a slot of so many rows and columns holds all that a block has. One copy of whole rows takes 1.3 % less of Qwen2.5-1.5B's
    chain than two of their halves (H200, 1536x1536)."""
    return shape.k <= columns and shape.n <= rows * shape.blocks(target, blocks_per_sm, rows)


def ring_schedule(*, rows: int, columns: int, stages: int, in_flight: int, blocks_per_sm: int, warps: int = WARPS,
                  specialize_k: bool = True) -> Schedule:
    """One ring schedule; the parameters of the direct path are 0."""
    return Schedule({"path": "ring", "warps": warps, "rows": rows, "columns": columns, "stages": stages,
                     "in_flight": in_flight, "blocks_per_sm": blocks_per_sm, "unroll": 0, "warps_per_row": 1,
                     "specialize_k": specialize_k})


def _badness(shape: Shape, schedule: Schedule, target: Target) -> float:
    """Distance from what won on the H200: a ring up to the block's share of the weight, half of it in flight."""
    resident = schedule.integer("blocks_per_sm")
    blocks = shape.blocks(target, resident, schedule.integer("warps"))
    share = shape.weight_bytes / blocks
    room = target.shared_bytes_per_sm / resident - SHARED_RESERVED_PER_BLOCK - shape.k * shape.element_bytes
    stage = stage_bytes(shape, schedule)
    ring = schedule.integer("stages") * stage
    flight = schedule.integer("in_flight") * stage
    ideal_ring = min(share, room, USUAL_RING_BYTES if share < 2 * USUAL_RING_BYTES else LARGEST_RING_BYTES)
    ideal_flight = min(max(ideal_ring / 2, IN_FLIGHT_BYTES[0]), IN_FLIGHT_BYTES[1])
    badness = abs(math.log2(ring / ideal_ring)) + abs(math.log2(flight / ideal_flight))
    badness += 3.0 * shape.sm_waste(target, blocks, schedule.integer("warps") * schedule.integer("rows"))
    badness += 0.0 if resident == 2 else 1.0
    badness += 0.0 if shape.k % schedule.integer("columns") == 0 else 0.5
    copy_bytes = min(schedule.integer("columns"), shape.k) * shape.element_bytes
    badness += 0.5 * max(0.0, math.log2(2048 / copy_bytes))  # small copies make the producer issue bound
    return badness + 0.05 * abs(schedule.integer("stages") - 3)
