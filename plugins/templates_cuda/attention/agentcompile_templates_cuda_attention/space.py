"""Schedules of the attention family: which are legal for a match, and in which order they are worth trying."""

from collections.abc import Iterator
from itertools import product

from attrs import frozen

from agentcompile_core.graph import DType
from agentcompile_core.plan import Parameter, Schedule, ScheduleSpace
from agentcompile_core.region import Match
from agentcompile_core.target import Target

WARP = 32
STATIC_SHARED_BYTES = 48 << 10  # static shared memory of a kernel
MOST_POINTS = 64
MOST_TENSOR_GROUP = 8  # query heads per KV head that one tensor-core fragment holds
TENSOR_POSITIONS = 16  # positions per warp and tensor-core step
REGISTERS_BESIDE = 48  # addresses, bounds, running maxima
NAMES = ("path", "warps", "lanes", "unroll", "splits")


@frozen(kw_only=True)
class Shape:
    """What the schedules depend on. ``vector``: elements per 16 bytes."""

    kv_heads: int
    group: int
    head_dim: int
    capacity: int
    dtype: DType

    @property
    def vector(self) -> int:
        """Elements of one 16-byte vector."""
        return 16 // self.dtype.bytes

    @property
    def head_vectors(self) -> int:
        """16-byte vectors of one head."""
        return self.head_dim // self.vector


def shape_of(match: Match) -> Shape:
    """The Shape of an attention match."""
    kv_heads = match.integer("kv_heads")
    return Shape(kv_heads=kv_heads, group=match.integer("heads") // kv_heads, head_dim=match.integer("head_dim"),
                 capacity=match.integer("capacity"), dtype=match.need("q").spec.dtype)


def space_of(shape: Shape, target: Target) -> ScheduleSpace:
    """At most 64 legal schedules: tensor cores before FMA where both exist, one block per SM before others."""
    paths = [path for path in (tensor_schedules(shape, target), lane_schedules(shape, target)) if path]
    share = MOST_POINTS // max(1, len(paths))
    points = tuple(point for path in paths for point in path[:share])
    parameters = tuple(Parameter(name=name, values=tuple(sorted({point[name] for point in points}))) for name in NAMES)
    return ScheduleSpace(parameters=parameters, points=points)


def lane_schedules(shape: Shape, target: Target) -> list[Schedule]:
    """FMA schedules: a group of ``lanes`` lanes owns a position, ``unroll`` positions in flight."""
    def legal(warps: int, lanes: int, unroll: int) -> bool:
        vectors = -(-shape.head_vectors // lanes)
        registers = 2 * shape.group * vectors * shape.vector + unroll * (8 * vectors + shape.group) + REGISTERS_BESIDE
        return registers <= _registers(warps, target) and _shared_bytes(shape, warps) <= STATIC_SHARED_BYTES

    widest = min(WARP, 1 << (shape.head_vectors - 1).bit_length())
    choices = [(warps, lanes, unroll) for warps, lanes, unroll in product((8, 4, 16), (widest, max(1, widest // 2)), (4, 2, 1))
               if legal(warps, lanes, unroll)]
    return [schedule("lanes", warps, lanes, unroll, splits)
            for splits in _splits(shape, target) for warps, lanes, unroll in choices
            if _useful(shape, warps * WARP // lanes * unroll, splits)]


def tensor_schedules(shape: Shape, target: Target) -> list[Schedule]:
    """Tensor-core schedules: a warp owns 16 positions at a time, ``unroll`` of these steps in flight."""
    if shape.dtype is DType.F32 or shape.group > MOST_TENSOR_GROUP:
        return []

    def legal(warps: int, unroll: int) -> bool:
        key_vectors, value_vectors = -(-shape.head_vectors // 4), -(-shape.head_vectors // 8)
        in_flight = unroll * (8 * key_vectors + 16 * value_vectors)  # K and V of one step, then q and the outputs
        registers = in_flight + 4 * key_vectors + 16 * value_vectors + 4 * unroll + REGISTERS_BESIDE
        return registers <= _registers(warps, target) and _shared_bytes(shape, warps) <= STATIC_SHARED_BYTES

    return [schedule("tensor", warps, 4, unroll, splits)
            for splits in _splits(shape, target) for warps, unroll in ((8, 1), (4, 1), (4, 2), (8, 2), (2, 2), (16, 1))
            if legal(warps, unroll) and _useful(shape, warps * TENSOR_POSITIONS * unroll, splits)]


def schedule(path: str, warps: int, lanes: int, unroll: int, splits: int) -> Schedule:
    """One schedule."""
    return Schedule({"path": path, "warps": warps, "lanes": lanes, "unroll": unroll, "splits": splits})


def _splits(shape: Shape, target: Target) -> Iterator[int]:
    """Splits per KV head: about one block per SM, or per 32 positions where those are fewer; then half, double, a quarter."""
    blocks = min(target.sm_count // shape.kv_heads, -(-shape.capacity // 32))
    even = 1 << max(0, blocks.bit_length() - 1)
    yield from dict.fromkeys((even, max(1, even // 2), even * 2, max(1, even // 4)))


def _useful(shape: Shape, tile: int, splits: int) -> bool:
    return splits == 1 or (splits // 2) * tile < shape.capacity


def _registers(warps: int, target: Target) -> int:
    return min(255, target.registers_per_sm // (warps * WARP))


def _shared_bytes(shape: Shape, warps: int) -> int:
    return warps * shape.group * (4 * shape.head_dim + 8) + 2 * (shape.group + 2) * shape.head_dim + 16
