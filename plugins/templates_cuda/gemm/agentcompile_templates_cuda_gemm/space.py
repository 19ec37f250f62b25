"""Schedules of the family: which tiles are legal for a product, and in which order they are worth trying."""

from collections.abc import Iterator

from attrs import evolve, frozen

from agentcompile_core.plugin_api import Parameter, Schedule, ScheduleSpace, Target

from .shape import Shape

WARP = 32
PAD = 4  # floats behind each term of a slice, as in gemm.cu
STATIC_SHARED_BYTES = 48 << 10
MOST_TENSOR, MOST_SIMT = 40, 16
MOST_PARTS_BYTES = 256 << 20
LARGEST_GRID = 2**31 - 1
LAUNCH_US = 3.0  # of a second launch
SM_FMA_PER_US = 217e3  # of fp32: 128 lanes at 1.7 GHz
SLICES_PER_SPLIT = 4  # fewer do not pay for filling the pipeline
REGISTERS_BESIDE = 44  # addresses, bounds, loop counters
# Rows and columns of a tile, sums of a thread along each, terms of a slice.
SIMT = ((128, 128, 8, 8, 8), (128, 128, 8, 8, 16), (128, 64, 8, 4, 16), (64, 128, 4, 8, 16), (64, 64, 4, 4, 16), (32, 128, 4, 4, 16),
        (128, 32, 4, 4, 16), (32, 64, 4, 4, 16), (64, 32, 4, 4, 16), (32, 32, 4, 4, 32), (16, 64, 2, 4, 32), (64, 16, 4, 2, 32),
        (4, 128, 1, 4, 32), (128, 4, 4, 1, 32))


@frozen(kw_only=True)
class Tile:
    """How the results of a product are dealt out: ``rows`` x ``columns`` to a block, ``depth`` terms at a time, the terms to ``splits``."""

    path: str
    rows: int
    columns: int
    depth: int
    thread_rows: int = 0  # path simt: sums of a thread
    thread_columns: int = 0
    splits: int = 1

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.rows // self.thread_rows * (self.columns // self.thread_columns)

    @property
    def schedule(self) -> Schedule:
        """The tile as a point of the space."""
        own = {"thread_rows": self.thread_rows, "thread_columns": self.thread_columns}
        return Schedule({"path": self.path, "rows": self.rows, "columns": self.columns, "depth": self.depth, "splits": self.splits, **own})


def tile_of(schedule: Schedule) -> Tile:
    """The tile that a point of the space names."""
    values = dict(schedule.items)
    return Tile(path=str(values.pop("path")), **{name: int(value) for name, value in values.items()})


def space_of(shape: Shape, target: Target) -> ScheduleSpace:
    """Legal schedules, those first that should take least time."""
    points = tuple(tile.schedule for tile in _best(_simt(shape, target), shape, target, MOST_SIMT))
    names = sorted({name for point in points for name, _ in point.items})
    values = {name: {value for point in points for key, value in point.items if key == name} for name in names}
    return ScheduleSpace(parameters=tuple(Parameter(name=name, values=tuple(sorted(values[name]))) for name in names), points=points)


def blocks_of(shape: Shape, tile: Tile) -> int:
    """Blocks that make the tiles of all products, for one split."""
    return -(-shape.m // tile.rows) * -(-shape.n // tile.columns) * shape.batch


def terms_of(shape: Shape, tile: Tile) -> int:
    """Terms of one split: whole slices."""
    return -(-shape.k // (tile.splits * tile.depth)) * tile.depth


def splits_of(shape: Shape, tile: Tile) -> int:
    """Splits that have any terms."""
    return -(-shape.k // terms_of(shape, tile))


def shared_bytes(tile: Tile) -> int:
    """Static shared memory of a block."""
    return 2 * tile.depth * (tile.rows + tile.columns + 2 * PAD) * 4


def _simt(shape: Shape, target: Target) -> Iterator[Tile]:
    for rows, columns, thread_rows, thread_columns, depth in SIMT:
        tile = Tile(path="simt", rows=rows, columns=columns, depth=depth, thread_rows=thread_rows, thread_columns=thread_columns)
        registers = thread_rows * thread_columns + 4 * (thread_rows + thread_columns) + REGISTERS_BESIDE
        fits = shared_bytes(tile) <= STATIC_SHARED_BYTES and registers <= min(255, target.registers_per_sm // tile.threads)
        if fits and _fits_extents(shape, tile):
            yield from _with_splits(shape, tile, target)


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
    return sorted(dict.fromkeys(tiles), key=lambda tile: predicted_us(shape, tile, target))[:most]


def predicted_us(shape: Shape, tile: Tile, target: Target) -> float:
    """A guess to sort by: rounds of blocks over the SMs times what a tile takes, and the way of the parts of several splits."""
    rounds = blocks_of(shape, tile) * tile.splits / target.sm_count
    rounds = float(-(-rounds // 1)) if rounds < 4 else rounds
    each = tile.rows * tile.columns * terms_of(shape, tile) / (SM_FMA_PER_US * _efficiency(tile))
    parts = LAUNCH_US + target.floor_us(8 * shape.count * tile.splits) if tile.splits > 1 else 0.0
    return max(1.0, rounds) * each + parts


def _efficiency(tile: Tile) -> float:
    """Of the FMA pipes: sums per value that is read from shared memory, and warps that hide each other's latency."""
    reuse = tile.thread_rows * tile.thread_columns / (tile.thread_rows + tile.thread_columns) / 4.0
    return min(1.0, reuse) * min(1.0, 0.4 + tile.threads / 400)
