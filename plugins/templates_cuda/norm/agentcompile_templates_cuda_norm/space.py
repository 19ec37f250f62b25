"""The schedules of the norm family, likeliest winner first: which path holds, keeps, splits or reads again the rows of a match."""

import math
from collections.abc import Iterable

from attrs import frozen

from agentcompile_core.plugin_api import Feature, Match, Parameter, Schedule, ScheduleSpace, Target

WARP = 32
VECTOR_BYTES = 16
MOST_VECTORS = 4  # of a row that a thread holds in registers
MOST_VALUES = 32  # elements that a thread of a cluster holds as floats
LOOPED_FROM = 12288  # elements of a row that pay for reading it more than once
LOOPED_BYTES = 16384  # of a row from which on blocks that read it again compete with those that hold it, where rows fill the device
LONGEST_LOOPED = 2**31 - 2**14  # elements: the place behind the last of a block is counted in 32 bits too
MOST_OF_ROWS = 8  # vectors that a thread holds of several rows
MANY = 16  # rows for every SM, of which a warp may have several
SPLIT_FROM = 32768  # bytes of a row that pay for a second launch where rows are fewer than SMs
SPLIT_THREADS = 512
MOST_SPLIT_ROWS = 65535  # rows are the second dimension of the grid
LONGEST = 2**30  # elements of a row whose places are counted in 32 bits
CLUSTER = 8  # blocks; more are not portable
IN_FLIGHT = 24576  # bytes on their way to an SM that reach the memory's bandwidth: 4.8 TB/s, half of it reads, for 1.3 us by 132 SMs
ROUNDS = 4  # rows per team that pay for a grid that walks over them
Point = dict[str, int | str]


@frozen(kw_only=True)
class Shape:
    """What schedules depend on: ``vectors`` of 16 bytes in a row, ``step`` elements in one, registers of weights per step."""

    rows: int
    columns: int
    vectors: int
    step: int
    weight_words: int
    operands: int  # read from memory for each row
    lone: bool  # no rows beside these


def shape_of(match: Match) -> Shape:
    """The shape of a norm."""
    x, step = match.need("x"), VECTOR_BYTES // match.need("x").spec.dtype.bytes
    weights = [operand for operand in (match.operand("weight"), match.operand("bias")) if operand is not None]
    columns = max(match.integer("columns"), match.integer("columns_beside", 0))
    return Shape(rows=max(match.integer("rows"), match.integer("rows_beside", 0)), columns=columns,
                 vectors=-(-columns * x.spec.dtype.bytes // VECTOR_BYTES), step=step,
                 weight_words=sum(step * operand.spec.dtype.bytes // 4 for operand in weights),
                 operands=1 + (match.operand("residual") is not None), lone=match.operand("x_beside") is None)


def vectors_each(shape: Shape, threads: int) -> int:
    """Vectors of a row for each of ``threads``."""
    return -(-shape.vectors // threads)


def part_of(shape: Shape, splits: int) -> int:
    """Elements of a part, a multiple of a step, where a row is split; there may be fewer parts than ``splits``."""
    return -(-shape.vectors // splits) * shape.step


def is_channels(match: Match) -> bool:
    """Whether weights are those of channels, not of columns."""
    return match.integer("groups", 1) > 1 or match.integer("span", 1) > 1


def space_of(match: Match, target: Target) -> ScheduleSpace:
    """All points, at most 24."""
    shape = shape_of(match)
    held, kept, looped = _held(match, shape, target), _kept(match, shape, target), _looped(match, shape)
    few = 2 * shape.rows <= target.sm_count and VECTOR_BYTES * shape.vectors >= SPLIT_FROM
    fills = bool(held) and shape.rows >= target.sm_count and VECTOR_BYTES * shape.vectors >= LOOPED_BYTES
    early, late = (looped, []) if fills else ([], looped if shape.columns >= LOOPED_FROM else [])
    long = _long(shape, target) if shape.lone and (few or not held) else []
    ordered = [*held[:2], *kept[:1], *early, *held[2:], *kept[1:], *long, *late]
    names = sorted({name for point in ordered for name in point})
    parameters = tuple(Parameter(name=name, values=tuple(sorted({p[name] for p in ordered if name in p}))) for name in names)
    return ScheduleSpace(parameters=parameters, points=tuple(map(Schedule, ordered)))


def _held(match: Match, shape: Shape, target: Target) -> list[Point]:
    """A warp per row first where rows are short and many, else one block per row.

    Of rows that fill the device those blocks come first that give a thread two vectors: they reached the most on an H200 for rows of
    16 and of 32 KiB in two types, four came behind them, one last (docs/performance.md). Of many short rows a warp may have several.
    """
    warp, many = [(128, 1, 1)], shape.rows >= MANY * target.sm_count and not is_channels(match)
    blocks = [(threads, threads // WARP, 1) for threads in (256, 128, 512, 1024, 64)]
    if shape.rows >= target.sm_count:
        blocks.sort(key=lambda block: (abs(math.log2(vectors_each(shape, block[0]) / 2)), block[0]))
    short = shape.rows > 1 and shape.columns <= 512
    if short and many:
        warp += [(WARP, 1, 4), (512, 1, 1), (2 * WARP, 1, 2)]
    chosen = [*warp, *blocks] if short else [*blocks, *warp]
    found: list[Point] = []
    for threads, warps, rows in chosen:
        each = vectors_each(shape, WARP * warps)
        if each <= MOST_VECTORS and rows * each <= MOST_OF_ROWS:
            found.append({"threads": threads, "warps_per_row": warps, **({"rows_each": rows} if rows > 1 else {})})
    return found


def _looped(match: Match, shape: Shape) -> list[Point]:
    """Blocks that read their row for each pass, those first of whose threads each reads two vectors of it."""
    if match.operand("residual") is not None or not shape.lone or match.epilogue is not None or shape.columns > LONGEST_LOOPED:
        return []
    sizes = [threads for threads in (1024, 512) if threads <= shape.vectors]
    return [{"path": "looped", "threads": threads} for threads in sorted(sizes, key=lambda size: abs(vectors_each(shape, size) - 2))]


def _kept(match: Match, shape: Shape, target: Target) -> list[Point]:
    """Grids that walk over rows, by the share of the bandwidth that what they have on their way and their last round allow."""
    if not shape.lone or match.epilogue is not None or is_channels(match) or shape.rows > LONGEST:
        return []
    chosen = [(128, lanes, batch) for lanes, batch in ((16, 1), (32, 2), (32, 1), (8, 1)) if _fits(shape, lanes, batch)]
    whole = (_threads(shape.vectors, each) for each in (2, 4, 1)) if shape.vectors > 2 * WARP else ()
    chosen += [(threads, threads, 1) for threads in dict.fromkeys(whole) if 64 <= threads <= 1024]
    found: list[tuple[float, Point]] = []
    for threads, lanes, batch in chosen:
        blocks, share = _resident(shape, threads, lanes, batch, target)
        if blocks and shape.rows >= ROUNDS * blocks * target.sm_count * (threads // lanes) * batch:
            found.append((share, {"path": "kept", "threads": threads, "lanes": lanes, "batch": batch, "blocks": blocks}))
    return [point for _, point in sorted(found, key=lambda pair: -round(pair[0], 2))]


def _fits(shape: Shape, lanes: int, batch: int) -> bool:
    """Whether a part of a warp holds a row, without lanes that have nothing of it."""
    return vectors_each(shape, lanes) * batch <= MOST_VECTORS and shape.vectors > lanes // 2


def _resident(shape: Shape, threads: int, lanes: int, batch: int, target: Target) -> tuple[int, float]:
    """Blocks per SM, as many as registers allow or fewer that deal rows out more evenly, and the share of the bandwidth they may reach."""
    each = vectors_each(shape, lanes)
    registers = -(-(each * (batch * (shape.step + 4 * shape.operands) + shape.weight_words) + 36) // 8) * 8
    most = min(target.registers_per_sm // (registers * threads), 2048 // threads, 16)

    def share(blocks: int) -> float:
        rounds = shape.rows / (blocks * target.sm_count * (threads // lanes) * batch)
        on_their_way = blocks * threads * each * batch * shape.operands * VECTOR_BYTES
        return min(1.0, on_their_way / IN_FLIGHT) * rounds / -(-rounds // 1)

    best = max(range(1, most + 1), key=lambda blocks: (share(blocks), -blocks), default=0)
    return best, share(best) if best else 0.0


def _long(shape: Shape, target: Target) -> list[Point]:
    """Rows over several blocks: clusters first where rows are enough of them to fill half of the device."""
    if shape.rows > MOST_SPLIT_ROWS or shape.columns > LONGEST:
        return []
    split, clusters = list(_split(shape, target)), list(_clusters(shape, target))
    return [*clusters, *split] if shape.rows * CLUSTER * 2 >= target.sm_count else [*split, *clusters]


def _split(shape: Shape, target: Target) -> Iterable[Point]:
    """Parts that give every SM one, two or four blocks, or, of many rows, as few as blocks can hold."""
    fewest = -(-shape.vectors // (SPLIT_THREADS * MOST_VECTORS))
    found: dict[int, int] = {}
    for wanted in (*(waves * target.sm_count // shape.rows for waves in (1, 2, 4)), fewest):
        splits = max(wanted, fewest)
        splits = -(-shape.columns // part_of(shape, min(splits, -(-shape.vectors // WARP))))
        if splits > 1 and len(found) < 3:
            found.setdefault(splits, part_of(shape, splits) // shape.step)
    for splits, vectors in found.items():
        sizes = [_threads(vectors, each) for each in (2, 4, 1)]
        for threads in list(dict.fromkeys(size for size in sizes if size <= SPLIT_THREADS))[:2]:
            if splits <= 8 * max(threads, WARP):
                yield {"path": "split", "threads": threads, "splits": splits}


def _clusters(shape: Shape, target: Target) -> Iterable[Point]:
    """The blocks of a cluster for each row."""
    if not target.has(Feature.CLUSTER):
        return
    part = part_of(shape, CLUSTER)
    if -(-shape.columns // part) < CLUSTER:
        return
    for threads in (512, 256):
        each = -(-part // (threads * shape.step))
        if threads * shape.step < 2 * part and each * shape.step <= MOST_VALUES:
            yield {"path": "cluster", "threads": threads, "splits": CLUSTER}


def _threads(vectors: int, each: int) -> int:
    """Threads that hold ``vectors`` between them, ``each`` or fewer, in whole warps."""
    return -(-vectors // (each * WARP)) * WARP
