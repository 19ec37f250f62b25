"""What attention schedules depend on, and what a block of one takes: registers, shared memory, positions of a round."""

from attrs import evolve, frozen

from agentcompile_core.plugin_api import DType, Match, Schedule

WARP = 32
PARTS = "parts"
STAGED_PATHS = ("staged", "whole")  # K and V in stages of shared memory, taken one by one; all of a warp's at once
TENSOR_PATHS = ("tensor", *STAGED_PATHS)  # K and V of some rounds in registers; in stages
TENSOR_POSITIONS = 16  # positions per warp and tensor-core step
REGISTERS_BESIDE = 50  # addresses, bounds, running maxima
ALIGNED = 128  # bytes: where dynamic shared memory begins behind the static
CHUNK = 16  # outputs that have one owner among the splits of a cluster
CLUSTERED = ("message", "cluster")  # the merges whose splits are a cluster


@frozen(kw_only=True)
class Shape:
    """What the schedules depend on: the layer, and to how many blocks (``parts``) the query heads of a KV head are dealt."""

    kv_heads: int
    group: int  # query heads per KV head
    head_dim: int
    value_dim: int
    capacity: int
    dtype: DType
    parts: int = 1

    @property
    def block_heads(self) -> int:
        """Query heads of a block. They are dealt evenly: the block with the most decides about time, registers and shared memory."""
        return -(-self.group // self.parts)

    @property
    def vector(self) -> int:
        """Elements of one 16-byte vector."""
        return 16 // self.dtype.bytes

    @property
    def head_vectors(self) -> int:
        """16-byte vectors of one head."""
        return self.head_dim // self.vector

    @property
    def value_vectors(self) -> int:
        """16-byte vectors of one row of V."""
        return self.value_dim // self.vector


def shape_of(match: Match) -> Shape:
    """The Shape of an attention match."""
    kv_heads = match.integer("kv_heads")
    return Shape(kv_heads=kv_heads, group=match.integer("heads") // kv_heads, head_dim=match.integer("head_dim"),
                 value_dim=match.integer("value_dim", 0) or match.integer("head_dim"),
                 capacity=match.integer("capacity"), dtype=match.need("q").spec.dtype)


def in_parts(shape: Shape, schedule: Schedule) -> Shape:
    """The shape with its query heads dealt as the schedule says."""
    return evolve(shape, parts=parts_of(schedule))


def parts_of(schedule: Schedule) -> int:
    """To how many blocks the query heads of a KV head are dealt."""
    return int(dict(schedule.items).get(PARTS, 1))


def registers(shape: Shape, path: str, lanes: int, unroll: int) -> int:
    """Registers per thread: K and V in flight and scores, then q and the outputs, in fragments or per lane; of all stages at once half
    as many again, which the assembler takes for what it reads ahead."""
    if path in STAGED_PATHS:
        held = 2 * -(-shape.head_vectors // 2) + 4 * -(-shape.value_vectors // 2)
        ahead = 0 if steps_at_once(path, unroll) == 1 else held // 2 + 8 * unroll + (8 if unroll == 2 else 24)
        return held + REGISTERS_BESIDE + 10 + ahead
    if path in TENSOR_PATHS:
        key_vectors, value_vectors = -(-shape.head_vectors // 4), -(-shape.value_vectors // 8)
        return unroll * (8 * key_vectors + 16 * value_vectors + 4) + 4 * key_vectors + 16 * value_vectors + REGISTERS_BESIDE
    keys, values = -(-shape.head_vectors // lanes), -(-shape.value_vectors // lanes)
    heads = shape.block_heads
    return (heads * shape.vector + 4 * unroll) * (keys + values) + unroll * heads + REGISTERS_BESIDE


def steps_at_once(path: str, stages: int) -> int:
    """Steps that a warp takes at once, of those that wait in its stages."""
    return stages if path == "whole" else 1


def shared_bytes(shape: Shape, schedule: Schedule) -> int:
    """Static shared memory of a block; of ``in_parts(shape, schedule)``."""
    return static_bytes(shape, str(schedule["path"]), schedule.integer("warps"), str(schedule["merge"]), schedule.integer("splits"))


def stage_bytes(shape: Shape, schedule: Schedule) -> int:
    """Dynamic shared memory of a block: its stages of K and V."""
    return bytes_of_stages(shape, str(schedule["path"]), schedule.integer("warps"), schedule.integer("unroll"))


def bytes_of_stages(shape: Shape, path: str, warps: int, stages: int) -> int:
    """As ``stage_bytes``, of the parts of a schedule."""
    if path not in STAGED_PATHS:
        return 0
    streamed = stages * TENSOR_POSITIONS * (shape.head_dim + shape.value_dim) * shape.dtype.bytes
    tiles = -(-shape.value_dim // 16)  # of a warp's outputs, which lie in its stages: with one more in a row where there would be even ones
    return warps * max(streamed, 8 * -(-shape.block_heads // 2) * 16 * (tiles + (tiles + 1) % 2))


def tile_of(path: str, warps: int, lanes: int, unroll: int) -> int:
    """Positions of a block and round."""
    return warps * (TENSOR_POSITIONS if path in TENSOR_PATHS else WARP // lanes) * (1 if path in STAGED_PATHS else unroll)


def static_bytes(shape: Shape, path: str, warps: int, merge: str, splits: int) -> int:
    """As ``shared_bytes``, of the parts of a schedule: of each warp its outputs, where they do not lie in its stages, and states; of each
    split of a cluster the same, but by messages no more outputs than the block owns of each."""
    heads, cluster = shape.block_heads, splits if merge in CLUSTERED else 0
    chunks = -(-heads * shape.value_dim // CHUNK) + cluster - 1 if merge == "message" else 0
    outputs = warps * (path not in STAGED_PATHS) + cluster * (merge == "cluster")
    merged = 4 * (outputs * heads * shape.value_dim + chunks * CHUNK) + 8 * (warps + cluster) * heads
    return -(-(merged + 2 * ((heads + 1) * shape.head_dim + shape.value_dim) + 16) // ALIGNED) * ALIGNED
