"""Tiles of the copy engine against numpy; products of warpgroups, and every misuse of them refused for its reason or wrong."""

import itertools
import math

import attrs
import numpy as np
import pytest
from agentcompile_validator_emulation.engine import Mode
from agentcompile_validator_emulation.module import SCHEDULES, Access, EmulationError, LaunchOptions
from agentcompile_validator_emulation.tiles import tiles_of
from emulation_fixtures import buffer, integer, module
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Role, Tiling, UsageError, tiles

SETTINGS = settings(max_examples=60, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
ROWS, COLUMNS, TERMS = 64, 128, 64
PRODUCT_BYTES = (ROWS + COLUMNS) * 128
TYPES = {DType.F16: np.uint16, DType.F32: np.uint32}


def fetched(name, array, tiling, dtype=DType.F16):
    return tiles_of(tiles(name, Role.INPUT, dtype, tiling), buffer(name, array))


@st.composite
def views(draw):
    """Element type, tiling, and where a tile is fetched, which may lie partly or wholly outside."""
    dtype = draw(st.sampled_from(list(TYPES)))
    whole, swizzle = 16 // dtype.bytes, draw(st.sampled_from([0, 128]))
    extents = [draw(st.integers(1, most)) for most in (80, 9, 4, 3)]
    line = 128 // dtype.bytes if swizzle else whole * draw(st.integers(1, 8))
    tile = (line, draw(st.integers(1, 10)), draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    steps, order = [1, 0, 0, 0], draw(st.permutations([1, 2, 3]))  # an axis may lie inside of those before it
    step = -(-extents[0] // whole) * whole + whole * draw(st.integers(0, 2))
    for axis in order:
        steps[axis] = step
        step *= extents[axis]
    tiling = Tiling(offset=whole * draw(st.integers(0, 3)), extents=tuple(extents), steps=tuple(steps), tile=tile, swizzle=swizzle)
    return dtype, tiling, tuple(draw(st.integers(-size, extent + 1)) for size, extent in zip(tile, extents, strict=True))


def expected(memory, tiling, at):
    """The bytes of a tile: zeros behind the ends of the axes, chunks of 16 bytes permuted by the number of 128 modulo 8."""
    made = np.zeros(tiling.tile[::-1], memory.dtype)
    for inside in itertools.product(*map(range, tiling.tile)):
        places = [first + i for first, i in zip(at, inside, strict=True)]
        if all(0 <= place < extent for place, extent in zip(places, tiling.extents, strict=True)):
            made[inside[::-1]] = memory[tiling.offset + sum(place * step for place, step in zip(places, tiling.steps, strict=True))]
    flat, byte = made.view(np.uint8).reshape(-1), np.arange(made.nbytes)
    return flat[byte ^ (byte >> 7 & 7) << 4 if tiling.swizzle else byte]


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.CHECKED])
@SETTINGS
@given(view=views(), order=st.sampled_from(SCHEDULES), seed=st.integers(0, 99))
def test_a_tile_is_what_its_view_says(mode, view, order, seed):
    dtype, tiling, at = view
    memory = np.random.default_rng(seed).integers(1, 60000, tiling.end).astype(TYPES[dtype])
    nbytes = math.prod(tiling.tile) * dtype.bytes
    out = np.zeros(nbytes, np.uint8)
    module("warpgroups.cu", mode).launch("one_tile", (1,), (32,), [fetched("x", memory, tiling, dtype), buffer("out", out, Access.WRITE),
                                         *map(integer, at), integer(nbytes), integer(1024)], 1024 + nbytes, order)
    np.testing.assert_array_equal(out, expected(memory, tiling, at))


BEYOND = r"out of bounds: read of 128 bytes by a tile, \d+ bytes past the end of argument 'x'"
BOX = Tiling(extents=(64, 64, 1, 1), steps=(1, 64, 4096, 4096), tile=(64, 64, 1, 1), swizzle=128)
REFUSED = {
    "its destination is no multiple of 1,024 bytes": ({}, 128, "a tile is fetched to no multiple of 1024 bytes"),
    "it lies behind shared memory": ({}, 9 * 1024, "the destination is not inside dynamic shared memory"),
    "its view is longer than the operand": ({"extents": (64, 65, 1, 1)}, 0, BEYOND),
    "its lines are": ({"extents": (72, 64, 1, 1), "steps": (1, 72, 4608, 4608)}, 0, BEYOND),
    "it has three axes": ({"extents": (64, 64, 1), "steps": (1, 64, 4096), "tile": (64, 64, 1)}, 0, "at 4 places, its view has 3 axes"),
    "fewer bytes are expected": ({"tile": (64, 32, 1, 1)}, 0, "0 arrivals and 4096 bytes missing"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_tile_is_refused_where(what):
    changes, place, reason = REFUSED[what]
    memory, out = np.ones((64, 64), np.uint16), np.zeros(8192, np.uint8)
    numbers = (0, int("longer" in what), 0, 0, 8192, place)
    arguments = [fetched("x", memory, attrs.evolve(BOX, **changes)), buffer("out", out, Access.WRITE), *map(integer, numbers)]
    with pytest.raises(EmulationError, match=reason):
        module("warpgroups.cu", Mode.CHECKED).launch("one_tile", (1,), (32,), arguments, 8192 + 2048, LaunchOptions(lazy_copies=True))


@pytest.mark.parametrize("changes, reason", [
    ({"offset": 4}, "must be multiples of 16 bytes"), ({"steps": (1, 68, 4096, 4096)}, "must be multiples of 16 bytes"),
    ({"tile": (60, 64, 1, 1), "swizzle": 0}, "lines are multiples of 16 bytes"), ({"tile": (64, 257, 1, 1)}, "axes at most 256"),
    ({"tile": (32, 64, 1, 1)}, "lines of 64 bytes swizzled by 128"), ({"extents": (8,) * 5}, "5 axes; at most 4")])
def test_tiles_that_no_launch_takes(changes, reason):
    with pytest.raises(UsageError, match=reason):
        fetched("x", np.ones((64, 80), np.uint16), attrs.evolve(BOX, **changes))


def product(entry, mode, options):
    """Launch a kernel of warpgroups.cu; the greatest error, infinite for NaN."""
    random = np.random.default_rng(3)
    a, b = (random.integers(-4, 5, (rows + 1, TERMS)).astype(np.float16) for rows in (ROWS, COLUMNS))
    out = np.zeros((ROWS, COLUMNS), np.float32)
    views = [Tiling(extents=(TERMS, rows + 1, 1, 1), steps=(1, TERMS, *[TERMS * (rows + 1)] * 2), tile=(TERMS, rows, 1, 1), swizzle=128)
             for rows in (ROWS, COLUMNS)]
    module("warpgroups.cu", mode).launch(entry, (1,), (128,), [fetched("a", a, views[0]), fetched("b", b, views[1]),
                                         buffer("line", a[0].copy()), buffer("out", out, Access.WRITE)], PRODUCT_BYTES,
                                         attrs.evolve(options, deadline_s=20.0))
    return float(np.nan_to_num(np.abs(out - a[:ROWS].astype(float) @ b[:COLUMNS].astype(float).T), nan=math.inf).max())


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.CHECKED])
@pytest.mark.parametrize("entry", ["clean_product", "clean_two_groups", "clean_stored_and_fenced", "clean_copied_and_fenced"])
def test_products_are_exact_in_every_order(entry, mode):
    assert [product(entry, mode, options) for options in SCHEDULES] == [0.0] * len(SCHEDULES)


# What the message says; empty: the result is wrong. Without checks, and with them.
BUGS = {
    "bug_no_wait": ("sums are used before the product", "sums are used before the product"),
    "bug_read_early": ("", ""),
    "bug_no_fence": ("no wg::fence", "no wg::fence"),
    "bug_no_commit": ("sums are used before", "sums are used before"),
    "bug_written_early": ("sum 5 of lane 0 was written before", "sum 5 of lane 0 was written before"),
    "bug_refilled": ("", "race: dynamic shared memory at byte 0: write by this thread and read by a product of warp"),
    "bug_lanes_differ": ("lanes 0 and 3 of a warp differ", "lanes 0 and 3 of a warp differ"),
    "bug_warps_differ": ("warps 0 and 3 of a warpgroup did different steps", "warps 0 and 3 of a warpgroup did different steps"),
    "bug_warp_missing": ("warps 0 and 2 of a warpgroup did different steps", "warps 0 and 2 of a warpgroup did different steps"),
    "bug_misaligned": ("swizzled panels begin at multiples of 1,024", "swizzled panels begin at multiples of 1,024"),
    "bug_not_swizzled": ("without the swizzle of 128 bytes", "without the swizzle of 128 bytes"),
    "bug_outside": ("leaves dynamic shared memory", "leaves dynamic shared memory"),
    "bug_overlapping": ("partly those of another product", "partly those of another product"),
}


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.CHECKED])
@pytest.mark.parametrize("entry", BUGS)
def test_misuse_of_products_is_refused_or_wrong(entry, mode):
    reason = BUGS[entry][mode is Mode.CHECKED]
    for options in SCHEDULES:
        if reason:
            with pytest.raises(EmulationError, match=reason):
                product(entry, mode, options)
        elif options.lazy_copies or entry != "bug_refilled":  # made when they are asked for, products do not see what comes later
            assert product(entry, mode, options) > 1.0


def test_what_threads_store_is_no_factor():
    with pytest.raises(EmulationError, match="which thread 0 stored: what threads store is not fenced for the asynchronous proxy"):
        product("bug_stored", Mode.CHECKED, SCHEDULES[0])


@pytest.mark.parametrize(("entry", "thread"), [("fenced_first", 0), ("fenced_late", 0), ("fenced_by_another", 7), ("copy_fenced_early", 0)])
def test_a_fence_counts_behind_the_store_and_before_what_tells_of_it(entry, thread):
    for options in SCHEDULES:
        with pytest.raises(EmulationError, match=rf"which thread {thread} stored: what threads store is not fenced"):
            product(f"bug_{entry}", Mode.CHECKED, options)


@pytest.mark.parametrize(("entry", "reason"), [
    ("bug_more_registers_than_there_are", "ask for 2048 registers a lane together, and it is launched with 2016: they never come free"),
    ("bug_shrinks_to_more", "a warpgroup that has 168 registers cannot shrink to 176"),
    ("bug_grows_to_fewer", "a warpgroup that has 168 registers cannot grow to 160")])
def test_registers_that_never_come_free_are_refused(entry, reason):
    assert [turns("clean_registers", options, 384) for options in SCHEDULES] == [1] * len(SCHEDULES)
    for options in SCHEDULES:
        with pytest.raises(EmulationError, match=reason):
            turns(entry, options, 384)


def turns(entry, options, threads=128):
    out = np.zeros(1, np.int32)
    module("warpgroups.cu", Mode.CHECKED).launch(entry, (1,), (threads,), [buffer("out", out, Access.WRITE)], 0, options)
    return int(out[0])


def test_who_comes_to_a_named_barrier_without_waiting_is_before_those_that_wait():
    assert [turns("clean_turns", options) for options in SCHEDULES] == [2 * (2 * (2 * 1 + 1) + 2) + 3] * len(SCHEDULES)


@pytest.mark.parametrize(("entry", "reason"), [
    ("bug_turn_of_nobody", "race: static shared memory|uninitialised read: static shared memory"),
    ("bug_two_turns_at_once", "named barrier 1: this thread comes to it twice before the others came")])
def test_turns_that_order_nothing_are_refused(entry, reason):
    for options in SCHEDULES:
        with pytest.raises(EmulationError, match=reason):
            turns(entry, options)
