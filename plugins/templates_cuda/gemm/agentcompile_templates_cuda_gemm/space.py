"""Schedules of the family: which tiles are legal for a product, and in which order they are worth trying."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain, zip_longest

from agentcompile_cuda_kit.needs import MOST_REGISTERS, REGISTERS, SHARED, most_registers
from attrs import evolve

from agentcompile_core.plugin_api import DType, Feature, Parameter, ScheduleSpace, Target

from .row_space import row_registers, row_shared_bytes, row_terms, row_tiles, row_us
from .shape import Shape
from .tile import WARP, Tile

CHUNK = 8  # elements of 16 bits that are copied at once
PAD = 4  # floats behind each term of a slice, as in gemm.cu
STATIC_SHARED_BYTES = 48 << 10
MOST_TENSOR, MOST_SIMT, MOST_ALIKE, MOST_ROW = 40, 16, 4, 12
LARGEST_WARP = 64 * 64  # results of a warp
# Per SM and us, at 1.7 GHz: of fp16 1,024 per cycle by mma.sync, 2,048 by warpgroups; of fp32 a sixth of the former.
SM_TENSOR_FMA_PER_US = {"tensor": 1740e3, "wgmma": 3480e3, "bf16x6": 290e3}
MOST_PARTS_BYTES = 256 << 20
LARGEST_GRID = 2**31 - 1
LAUNCH_US = 3.0  # of a second launch
RESULTS_US, FILL_US = 1.5, 1.0  # of a tile of warpgroups: its results leave, and the ring fills unless the block did another tile before
SM_FMA_PER_US = 217e3  # of fp32: 128 lanes at 1.7 GHz
SLICES_PER_SPLIT = 4  # fewer do not pay for filling the pipeline
REGISTERS_BESIDE = 44  # addresses, bounds, loop counters
SM_REGISTERS, COPIER_REGISTERS = 65536, 40  # of an SM that has warpgroups; of a thread of the one that copies
# Rows and columns of a tile, sums of a thread along each, terms of a slice.
SIMT = ((128, 128, 8, 8, 8), (128, 128, 8, 8, 16), (128, 64, 8, 4, 16), (64, 128, 4, 8, 16), (64, 64, 4, 4, 16), (32, 128, 4, 4, 16),
        (128, 32, 4, 4, 16), (32, 64, 4, 4, 16), (64, 32, 4, 4, 16), (32, 32, 4, 4, 32), (16, 64, 2, 4, 32), (64, 16, 4, 2, 32),
        (4, 128, 1, 4, 32), (128, 4, 4, 1, 32))
# Rows and columns of a tile and of a warp's part of it.
TENSOR = ((128, 256, 64, 64), (256, 128, 64, 64), (128, 128, 64, 32), (128, 128, 32, 64), (128, 128, 64, 64), (64, 256, 32, 64),
          (256, 64, 64, 32), (128, 64, 32, 32), (64, 128, 32, 32), (64, 64, 32, 32), (32, 128, 16, 64), (32, 64, 16, 32), (64, 32, 32, 16),
          (16, 128, 16, 32), (16, 64, 16, 16), (32, 32, 16, 16))
# Rows and columns of a tile, rows of a warpgroup's part of it, slices in the ring: as many as have room.
WARPGROUP = ((128, 256, 64, 4), (256, 128, 128, 4), (128, 128, 64, 6), (256, 128, 64, 4), (64, 256, 64, 5), (64, 128, 64, 8))
WARPGROUP_DEPTH = 64
CLUSTERS = (1, 2)  # blocks that share columns of b
BARRIER_BYTES = 2 * 8  # of a place in the ring
# The same of tiles of fp32 that are split into three planes of bf16, two slices in turn.
PIECES = ((128, 128, 64, 32), (128, 64, 32, 32), (64, 128, 32, 32), (64, 64, 32, 32), (64, 64, 32, 16), (32, 64, 16, 32), (64, 32, 32, 16),
          (32, 32, 16, 16))
PIECES_DEPTH, PLANES = 32, 3
SLICES = ((64, 3), (32, 4), (64, 4), (32, 3), (64, 2), (32, 5))  # terms of a slice, and how many of them are in the ring


def space_of(shape: Shape, target: Target) -> ScheduleSpace:
    """Legal schedules, those first that should take least time: those for one row, then two on tensor cores for each other one."""
    on_tensor_cores = chain(_warpgroups(shape, target), _tensor(shape, target), _pieces(shape, target))
    tensor, simt = iter(_best(on_tensor_cores, shape, target, MOST_TENSOR)), _best(_simt(shape, target), shape, target, MOST_SIMT)
    mixed = chain(_best(row_tiles(shape, target), shape, target, MOST_ROW),
                  (tile for three in zip_longest(tensor, tensor, simt) for tile in three if tile is not None))
    points = tuple(tile.schedule for tile in mixed)
    names = sorted({name for point in points for name, _ in point.items})
    values = {name: {value for point in points for key, value in point.items if key == name} for name in names}
    return ScheduleSpace(parameters=tuple(Parameter(name=name, values=tuple(sorted(values[name]))) for name in names), points=points,
                         ruled_out=tuple(sorted(_ruled_out(shape, target).items())))


def _ruled_out(shape: Shape, target: Target) -> Counter[str]:
    """How many tiles do not fit, by the reason."""
    found: Counter[str] = Counter()
    tensor = (*_tensor_tiles(),) if _has_tensor_cores(shape, target) else ()
    pieces = (*_pieces_tiles(),) if _has_pieces(shape, target) else ()
    for tile in (*_simt_tiles(), *tensor, *pieces, *(_warpgroup_tiles() if _has_warpgroups(shape, target) else ())):
        if registers_of(tile) > most_registers(tile.threads, target):
            found[REGISTERS] += 1
        elif shared_bytes(tile) > (target.shared_bytes_per_block if tile.tensor else STATIC_SHARED_BYTES):
            found[SHARED] += 1
    return found


def registers_of(tile: Tile) -> int:
    """Registers per thread: sums, fragments of two slices (values of one step without tensor cores), and what is beside them."""
    if tile.by_warpgroups:  # the compiler gives each thread its share; warpgroups that multiply take some of the one that copies
        return min(MOST_REGISTERS, SM_REGISTERS // tile.threads // 8 * 8)
    if tile.of_one_row:
        return row_registers(tile)
    if tile.in_pieces:  # beside the sums those of a slice, both factors' planes, and the next slice on its way
        fragments = tile.warp_columns // 2 + 2 * PLANES * (tile.warp_columns // 4 + 4)
        held = tile.depth * (tile.rows + tile.columns) // tile.threads
        return tile.warp_rows * tile.warp_columns // WARP + fragments + held + REGISTERS_BESIDE
    if tile.tensor:
        return tile.warp_rows * tile.warp_columns // WARP + 2 * (tile.warp_rows // 4 + tile.warp_columns // 4) + REGISTERS_BESIDE
    return tile.thread_rows * tile.thread_columns + 4 * (tile.thread_rows + tile.thread_columns) + REGISTERS_BESIDE


def warpgroup_registers(tile: Tile) -> tuple[int, int]:
    """Registers of a thread of the warpgroup that copies and of the others, once they have shared them out anew; 0: nobody does."""
    others = tile.rows // tile.warp_rows
    each = registers_of(tile)
    if others == 1:
        return 0, 0
    return COPIER_REGISTERS, min(MOST_REGISTERS // 8 * 8, (each * (others + 1) - COPIER_REGISTERS) // others // 8 * 8)


def blocks_of(shape: Shape, tile: Tile) -> int:
    """Blocks that make the tiles of all products, for one split."""
    if tile.of_one_row:
        return shape.m * -(-shape.n // tile.columns) * shape.batch * tile.cluster
    return -(-shape.m // (tile.rows * tile.cluster)) * tile.cluster * -(-shape.n // tile.columns) * shape.batch


def grid_of(shape: Shape, tile: Tile, target: Target) -> int:
    """Blocks of one split that are launched: fewer than there are tiles where each takes one after the other."""
    room = max(1, target.sm_count // (tile.splits * tile.cluster)) * tile.cluster
    return min(blocks_of(shape, tile), room) if tile.resident else blocks_of(shape, tile)


def terms_of(shape: Shape, tile: Tile) -> int:
    """Terms of one split: whole slices; of one block of a cluster for one row."""
    if tile.of_one_row:
        return row_terms(shape, tile)
    return -(-shape.k // (tile.splits * tile.depth)) * tile.depth


def splits_of(shape: Shape, tile: Tile) -> int:
    """Splits that have any terms."""
    if tile.of_one_row:
        return 1
    return -(-shape.k // terms_of(shape, tile))


def shared_bytes(tile: Tile) -> int:
    """Shared memory of a block: static without tensor cores, dynamic with them."""
    if tile.of_one_row:
        return row_shared_bytes(tile)
    if tile.in_pieces:
        return tile.stages * PLANES * tile.depth * (tile.rows + tile.columns) * 2
    if tile.tensor:
        return tile.stages * (tile.depth * (tile.rows + tile.columns) * 2 + (BARRIER_BYTES if tile.by_warpgroups else 0))
    return 2 * tile.depth * (tile.rows + tile.columns + 2 * PAD) * 4


def _simt_tiles() -> Iterator[Tile]:
    for rows, columns, thread_rows, thread_columns, depth in SIMT:
        yield Tile(path="simt", rows=rows, columns=columns, depth=depth, thread_rows=thread_rows, thread_columns=thread_columns)


def _simt(shape: Shape, target: Target) -> Iterator[Tile]:
    for tile in _simt_tiles():
        fits = shared_bytes(tile) <= STATIC_SHARED_BYTES and registers_of(tile) <= most_registers(tile.threads, target)
        if fits and _fits_extents(shape, tile):
            yield from _with_splits(shape, tile, target)


def _has_tensor_cores(shape: Shape, target: Target) -> bool:
    return shape.dtype is not DType.F32 and target.has(Feature.MMA_SYNC)


def _tensor_tiles() -> Iterator[Tile]:
    for rows, columns, warp_rows, warp_columns in TENSOR:
        for depth, stages in SLICES:
            yield Tile(path="tensor", rows=rows, columns=columns, depth=depth, warp_rows=warp_rows, warp_columns=warp_columns,
                       stages=stages)


def _tensor(shape: Shape, target: Target) -> Iterator[Tile]:
    for tile in _tensor_tiles() if _has_tensor_cores(shape, target) else ():
        if _fits_tensor(tile, target) and _fits_extents(shape, tile) and (tile.stages - 1) * tile.depth < max(shape.k, 2 * tile.depth):
            if tile.warp_rows * tile.warp_columns == LARGEST_WARP:  # its sums leave room for one block alone: nobody else fills its pauses
                yield from _with_splits(shape, evolve(tile, ahead=True), target)
            yield from _with_splits(shape, tile, target)


def _has_pieces(shape: Shape, target: Target) -> bool:
    return shape.dtype is DType.F32 and target.has(Feature.MMA_SYNC)


def _pieces_tiles() -> Iterator[Tile]:
    for rows, columns, warp_rows, warp_columns in PIECES:
        yield Tile(path="bf16x6", rows=rows, columns=columns, depth=PIECES_DEPTH, warp_rows=warp_rows, warp_columns=warp_columns, stages=2)


def _pieces(shape: Shape, target: Target) -> Iterator[Tile]:
    for tile in _pieces_tiles() if _has_pieces(shape, target) else ():
        fits = shared_bytes(tile) <= target.shared_bytes_per_block and registers_of(tile) <= most_registers(tile.threads, target)
        if fits and tile.rows <= 2 * shape.m and tile.columns <= 2 * shape.n:
            yield from _with_splits(shape, tile, target)


def _has_warpgroups(shape: Shape, target: Target) -> bool:
    return shape.dtype is not DType.F32 and target.has(Feature.WGMMA) and shape.a.view is not None and shape.b.view is not None


def _warpgroup_tiles() -> Iterator[Tile]:
    for rows, columns, warp_rows, stages in WARPGROUP:
        for cluster in CLUSTERS:
            yield Tile(path="wgmma", rows=rows, columns=columns, depth=WARPGROUP_DEPTH, warp_rows=warp_rows, warp_columns=columns,
                       stages=stages, cluster=cluster)


def _warpgroups(shape: Shape, target: Target) -> Iterator[Tile]:
    for tile in _warpgroup_tiles() if _has_warpgroups(shape, target) else ():
        if _fits_tensor(tile, target) and _fits_extents(shape, tile) and tile.rows * (tile.cluster - 1) < shape.m:
            yield from _with_splits(shape, tile, target)
            if blocks_of(shape, tile) > target.sm_count:
                yield evolve(tile, resident=True)


def _fits_tensor(tile: Tile, target: Target) -> bool:
    """Whether ring, sums and two sets of fragments have room, and every thread copies as many chunks of both factors."""
    even = tile.by_warpgroups or min(tile.rows, tile.columns) * tile.depth // CHUNK % tile.threads == 0
    return even and shared_bytes(tile) <= target.shared_bytes_per_block and registers_of(tile) <= most_registers(tile.threads, target)


def _fits_extents(shape: Shape, tile: Tile) -> bool:
    """Whether no more than half of a tile is empty; the smallest tiles always."""
    return (tile.rows <= 2 * shape.m or tile.rows <= 32) and (tile.columns <= 2 * shape.n or tile.columns <= 32)


def _with_splits(shape: Shape, tile: Tile, target: Target) -> Iterator[Tile]:
    """The tile as it is, and with the terms dealt out so that every SM has one or two blocks."""
    blocks = blocks_of(shape, tile)
    if blocks > LARGEST_GRID:
        return
    yield tile
    most = shape.k // (SLICES_PER_SPLIT * tile.depth)
    wanted = {min(waves * target.sm_count // blocks, most) for waves in (1, 2)} if blocks < target.sm_count else set()
    for splits in sorted(wanted):
        split = evolve(tile, splits=splits) if splits > 1 else tile
        if splits > 1 and splits_of(shape, split) == splits and 4 * splits * shape.count <= MOST_PARTS_BYTES:
            yield split


def _best(tiles: Iterator[Tile], shape: Shape, target: Target, most: int) -> list[Tile]:
    """The fastest ones, few of each size of tile."""
    found: list[Tile] = []
    sizes: Counter[tuple[int, ...]] = Counter()
    for tile in sorted(dict.fromkeys(tiles), key=lambda tile: predicted_us(shape, tile, target)):
        size = (tile.rows, tile.columns, tile.warp_rows, tile.warp_columns, tile.ahead, tile.cluster, tile.resident)
        if sizes[size] < MOST_ALIKE:
            sizes[size] += 1
            found.append(tile)
    return found[:most]


def predicted_us(shape: Shape, tile: Tile, target: Target) -> float:
    """A guess to sort by: rounds of blocks over the SMs times what a tile takes, and the way of the parts of several splits."""
    if tile.of_one_row:
        return row_us(shape, tile, target, blocks_of(shape, tile))
    rounds = blocks_of(shape, tile) * tile.splits / target.sm_count
    rounds = float(-(-rounds // 1)) if rounds < 4 else rounds
    pace = SM_TENSOR_FMA_PER_US[tile.path] * _tensor_efficiency(tile) if tile.tensor else SM_FMA_PER_US * _efficiency(tile)
    each = tile.rows * tile.columns * terms_of(shape, tile) / pace
    if tile.by_warpgroups:
        each += RESULTS_US if tile.resident else RESULTS_US + FILL_US
    parts = LAUNCH_US + target.floor_us(8 * shape.count * tile.splits) if tile.splits > 1 else 0.0
    return max(1.0, rounds) * each + parts


def _efficiency(tile: Tile) -> float:
    """Of the FMA pipes: sums per value that is read from shared memory, and warps that hide each other's latency."""
    reuse = tile.thread_rows * tile.thread_columns / (tile.thread_rows + tile.thread_columns) / 4.0
    return min(1.0, reuse) * min(1.0, 0.4 + tile.threads / 400)


def _tensor_efficiency(tile: Tile) -> float:
    """Of the tensor cores: results per value read from shared memory and from L2, and slices that are on their way."""
    warp = tile.warp_rows * tile.warp_columns / (tile.warp_rows + tile.warp_columns) / 32.0
    block = tile.rows * tile.columns / (tile.rows + tile.columns) / 80.0
    if tile.by_warpgroups:
        shared = tile.rows * tile.columns / (tile.rows + tile.columns / tile.cluster) / 80.0  # others of the cluster fetch columns, too
        return min(1.0, 0.6 + 0.4 * warp) * min(1.0, 0.5 + 0.3 * shared) * min(1.0, 0.6 + tile.threads / 960)
    on_the_way = min(1.0, 0.7 + (tile.stages - 1) * tile.depth / 400)
    return min(1.0, 0.5 + 0.5 * warp) * min(1.0, 0.3 + 0.7 * block) * on_the_way * min(1.0, 0.4 + tile.threads / 400)
