"""Schedules of gemv.cu: rows, unroll and warps per row, with the weights held in registers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from agentcompile_core.plan import Schedule
from agentcompile_core.target import Target

from .shape import SHARED_RESERVED_PER_BLOCK, WARP_SIZE, Shape, ceil_div

LARGEST_BATCH = 16  # 16-byte vectors that a thread holds; more would spill
STATIC_SHARED_BYTES = 2048  # reduction scratch of the kernel, rounded up
REGISTERS_BESIDE_BATCH = 64
REGISTERS_PER_VECTOR = 8  # four that are consumed, four that are being refilled
LONG_ROW_BYTES = 8 << 10  # from here on a row is worth more than one warp


def direct_schedules(shape: Shape, target: Target) -> tuple[Schedule, ...]:
    """All legal direct schedules, best guess first."""
    found = [schedule for schedule in _enumerate() if is_legal(shape, schedule, target)]
    return tuple(sorted(found, key=lambda schedule: _badness(shape, schedule, target)))


def step_vectors(schedule: Schedule) -> int:
    """Vectors of a row that a group of warps covers in one step."""
    return schedule.integer("warps_per_row") * schedule.integer("unroll") * WARP_SIZE


def padded_columns(shape: Shape, schedule: Schedule) -> int:
    """Elements of the staged row: whole steps."""
    width = step_vectors(schedule) * (shape.vector if shape.vectorized else 1)
    return ceil_div(shape.k, width) * width


def direct_shared_bytes(shape: Shape, schedule: Schedule) -> int:
    """Dynamic shared memory: the staged row. Enough for the kernel's own scalar path as well."""
    return padded_columns(shape, schedule) * shape.element_bytes


def batch(shape: Shape, schedule: Schedule) -> int:
    """16-byte vectors in flight per thread."""
    return schedule.integer("rows") * shape.pair * schedule.integer("unroll")


def registers(shape: Shape, schedule: Schedule) -> int:
    """Estimated registers per thread."""
    return REGISTERS_BESIDE_BATCH + REGISTERS_PER_VECTOR * batch(shape, schedule)


def min_blocks(shape: Shape, schedule: Schedule, target: Target) -> int:
    """Blocks per SM to promise to the compiler: what was asked for, as far as registers and shared memory allow."""
    threads = schedule.integer("warps") * WARP_SIZE
    by_registers = target.registers_per_sm // (threads * registers(shape, schedule))
    block_bytes = direct_shared_bytes(shape, schedule) + STATIC_SHARED_BYTES + SHARED_RESERVED_PER_BLOCK
    by_shared = target.shared_bytes_per_sm // block_bytes
    return max(1, min(schedule.integer("blocks_per_sm"), by_registers, by_shared, target.threads_per_sm // threads))


def is_legal(shape: Shape, schedule: Schedule, target: Target) -> bool:
    """Whether it fits into registers and shared memory without wasting most of its lanes."""
    shared = direct_shared_bytes(shape, schedule) + STATIC_SHARED_BYTES
    if shared > target.shared_bytes_per_block:
        return False
    fits_row = padded_columns(shape, schedule) <= 1.5 * shape.k or schedule.integer("warps_per_row") == 1
    return batch(shape, schedule) <= LARGEST_BATCH and fits_row


def _enumerate() -> Iterator[Schedule]:
    for warps in (8, 4):
        for warps_per_row in (1, warps // 2, warps):
            for rows in (1, 2, 4):
                for unroll in (2, 4, 8):
                    for blocks_per_sm in (2, 4, 8):
                        yield direct_schedule(warps=warps, warps_per_row=warps_per_row, rows=rows, unroll=unroll,
                                              blocks_per_sm=blocks_per_sm)


def direct_schedule(*, warps: int = 8, warps_per_row: int, rows: int, unroll: int, blocks_per_sm: int,
                    specialize_k: bool = False) -> Schedule:
    """One direct schedule; the parameters of the ring are 0."""
    return Schedule({"path": "direct", "warps": warps, "rows": rows, "columns": 0, "stages": 0, "in_flight": 0,
                     "blocks_per_sm": blocks_per_sm, "unroll": unroll, "warps_per_row": warps_per_row,
                     "specialize_k": specialize_k})


def _badness(shape: Shape, schedule: Schedule, target: Target) -> float:
    """Short rows like a warp each and all of the row in flight; long rows like several warps; SMs like 128 KB in flight."""
    warps, unroll = schedule.integer("warps"), schedule.integer("unroll")
    rows_per_round = warps // schedule.integer("warps_per_row") * schedule.integer("rows")
    blocks = shape.blocks(target, schedule.integer("blocks_per_sm"), warps // schedule.integer("warps_per_row"))
    resident = min_blocks(shape, schedule, target) * blocks / shape.blocks(target, schedule.integer("blocks_per_sm"), 1)
    flight = resident * warps * WARP_SIZE * batch(shape, schedule) * 16
    ideal_warps = 1 if shape.k * shape.element_bytes <= LONG_ROW_BYTES else warps
    badness = abs(math.log2(flight / (128 << 10)))
    badness += 0.5 * abs(math.log2(schedule.integer("warps_per_row") / ideal_warps))
    badness += 3.0 * shape.row_waste(blocks, rows_per_round)
    badness += 2.0 * (1.0 - shape.k / padded_columns(shape, schedule))
    badness += 0.0 if warps == 8 else 0.3
    grid_limit = 2 if target.has_bulk_copy else 8  # under programmatic dependent launch few blocks with much in flight win
    return badness + 0.3 * abs(math.log2(schedule.integer("blocks_per_sm") / grid_limit)) - 0.01 * unroll
