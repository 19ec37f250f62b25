"""Schedules of gemv.cu: rows, unroll and warps per row, with the weights held in registers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from agentcompile_cuda_kit.needs import FEW_BLOCKS, REGISTERS, SHARED, SHARED_RESERVED_PER_BLOCK

from agentcompile_core.plugin_api import Feature, Schedule, Target

from .shape import VECTOR_BYTES, WARP_SIZE, Shape, ceil_div

STATIC_SHARED_BYTES = 2048  # reduction scratch of the kernel, rounded up
# Registers per thread that hold a batch of 16-byte vectors without spills, measured with nvcc 13 over all paths:
# batch size and registers, for 16-bit elements and for fp32 (whose vectors need twice the addresses per row).
REGISTERS_FOR_BATCH = {2: ((2, 40), (4, 48), (8, 64), (16, 136)), 4: ((2, 48), (4, 64), (8, 128))}
IN_FLIGHT_BYTES_PER_SM = 64 << 10
LONG_ROW_BYTES = 8 << 10  # from here on a row is worth more than one warp


@lru_cache(maxsize=256)
def direct_schedules(shape: Shape, target: Target) -> tuple[Schedule, ...]:
    """All legal direct schedules, best guess first."""
    found = [schedule for schedule in _enumerate() if not problem(shape, schedule, target)]
    return tuple(sorted(found, key=lambda schedule: _badness(shape, schedule, target)))


@lru_cache(maxsize=256)
def ruled_out(shape: Shape, target: Target) -> Counter[str]:
    """How many schedules are not legal, by the reason."""
    return Counter(why for schedule in _enumerate() if (why := problem(shape, schedule, target)))


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
    """Registers per thread that a schedule needs; 0 where its batch would spill however many it gets."""
    needed = batch(shape, schedule)
    if shape.pair == 2 and needed > 8:  # the second set of addresses takes the room of some vectors
        return 0
    held = next((count for size, count in REGISTERS_FOR_BATCH[shape.element_bytes] if size >= needed), 0)
    if not held:
        return 0
    # Its bias is prefetched beside the weight of a norm; so is the weight of the norm before a residual, which lies beside both.
    beside = 16 * (shape.norm == "layer") + 48 * shape.summed + 24 * shape.written
    return held + beside + (8 if shape.pair == 2 and schedule.integer("warps_per_row") > 1 else 0)


def blocks_by_registers(shape: Shape, schedule: Schedule, target: Target) -> int:
    """How many blocks the register file of an SM holds; 0 where a batch cannot be held at all."""
    needed = registers(shape, schedule)
    return target.registers_per_sm // (schedule.integer("warps") * WARP_SIZE * needed) if needed else 0


def promised_blocks(shape: Shape, schedule: Schedule, target: Target) -> int:
    """Blocks per SM that the compiler is told to leave room for.

    Under programmatic dependent launch that is twice the grid's share: the next kernel's blocks must fit beside this
    one's, or their weights are not on the way when they are needed.
    """
    threads = schedule.integer("warps") * WARP_SIZE
    by_registers = blocks_by_registers(shape, schedule, target)
    block_bytes = direct_shared_bytes(shape, schedule) + STATIC_SHARED_BYTES + SHARED_RESERVED_PER_BLOCK
    by_shared = target.shared_bytes_per_sm // block_bytes
    wanted = schedule.integer("blocks_per_sm") * (2 if target.has(Feature.GRIDDEPCONTROL) else 1)
    return max(1, min(wanted, by_registers, by_shared, target.threads_per_sm // threads))


def problem(shape: Shape, schedule: Schedule, target: Target) -> str:
    """Why it does not fit into registers and shared memory, or wastes most of its lanes; empty: it is legal."""
    if direct_shared_bytes(shape, schedule) + STATIC_SHARED_BYTES > target.shared_bytes_per_block:
        return SHARED
    if padded_columns(shape, schedule) > 1.5 * shape.k and schedule.integer("warps_per_row") != 1:
        return "most of its lanes would have nothing to do"
    if not registers(shape, schedule):
        return REGISTERS
    return FEW_BLOCKS if blocks_by_registers(shape, schedule, target) < 2 else ""


def _enumerate() -> Iterator[Schedule]:
    for warps in (8, 4):
        for warps_per_row in (1, warps // 2, warps):
            for rows in (1, 2, 4):
                for unroll in (2, 3, 4, 8):
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
    """Short rows like a warp each, long rows like several warps; an SM likes 64 KB in flight, the next kernel's aside."""
    warps, asked = schedule.integer("warps"), schedule.integer("blocks_per_sm")
    groups = warps // schedule.integer("warps_per_row")
    blocks = shape.blocks(target, asked, groups)
    resident = min(asked, promised_blocks(shape, schedule, target), blocks / target.sm_count)
    flight = resident * warps * WARP_SIZE * batch(shape, schedule) * VECTOR_BYTES
    ideal_warps = 1 if shape.k * shape.element_bytes <= LONG_ROW_BYTES else warps
    badness = abs(math.log2(flight / IN_FLIGHT_BYTES_PER_SM))
    badness += 0.5 * abs(math.log2(schedule.integer("warps_per_row") / ideal_warps))
    badness += 3.0 * shape.row_waste(blocks, groups * schedule.integer("rows"))
    badness += 2.0 * (1.0 - shape.k / padded_columns(shape, schedule))
    badness += 0.0 if warps == 8 else 0.3
    grid_limit = 2 if target.has(Feature.GRIDDEPCONTROL) else 4  # under programmatic dependent launch few blocks win
    return badness + 0.3 * abs(math.log2(asked / grid_limit)) - 0.01 * schedule.integer("unroll")
