"""Schedules of the attention family: which are legal for a match, and in which order they are worth trying."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice, product, zip_longest

from agentcompile_cuda_kit.needs import FEW_BLOCKS, REGISTERS, SHARED, SHARED_RESERVED_PER_BLOCK, most_registers
from attrs import evolve

from agentcompile_core.plugin_api import DType, Feature, Parameter, Scalar, Schedule, ScheduleSpace, Target

from .shape import CLUSTERED, PARTS, WARP, Shape, bytes_of_stages, parts_of, registers, static_bytes, tile_of

STATIC_SHARED_BYTES = 48 << 10  # static shared memory of a kernel
MOST_POINTS = 64
MOST_TENSOR_GROUP = 8  # query heads of a block that one tensor-core fragment holds
PART_HEADS = (8, 4, 2)  # of a part, at the most: the fewer, the more often K and V are read, and the less a block has to merge
LEAST_DEALT = 4  # query heads of a group that a block could hold: fewer are not worth reading K and V again
CLUSTERS = (8, 4, 2)  # blocks of a cluster
# Where blocks of those leave half of the SMs alone. H200, 16x8x128 by messages: 4.7 us at 2,048 positions instead of 5.2, 12.6 at 8,192
# instead of 14.1; at 512, where there is little to split, 3.0 instead of 2.8. Two blocks of 16 have to fit on an SM: not every GPC has 16
# SMs, and where each block wants one for itself the clusters come one behind the other (8.4 us at 2,048 with 6 warps, 10 with 8).
WIDE_CLUSTERS = (8, 16, 4, 2)
# Whether K and V below the position may be read before the dependency wait. That is sound as long as only `advance` moves the
# position inside a captured chain: a kernel that sees its new value sees every row that earlier steps appended.
EARLY_KV = (True, False)
LATE = 2  # places that the other one comes behind: it has won nowhere yet
# What a block does best where it has thousands of positions: on the H100 the fastest or nearly so from 8,192 positions on (14.1 us
# there, 46.8 at 32,768 with two stages; in registers 15.4 and 47.7).
LONG: tuple[dict[str, Scalar], ...] = ({"path": "staged", "warps": 8, "unroll": 2}, {"path": "tensor", "warps": 8, "unroll": 2},
                                       {"path": "lanes", "warps": 8, "unroll": 4})
# What is fastest inside the chain at few positions, whatever it takes alone: of Qwen2.5-1.5B's (12x2x128, H200) 699 us with all heads in
# a block, 689 in two parts and 684 in three, where tensor cores that keep K and V in registers take 694 at the best.
FIRST: dict[str, dict[str, Scalar]] = {"message": {"path": "staged", "warps": 4, "unroll": 2}}
# What is faster in the chain than what a search of 50 s met first (Qwen3-1.7B, H200), by messages: from 2,048 positions on 6 warps of 3
# stages (0.991 of the chain with 8 of 2 at 2,080 and 3,300 positions), and clusters of 16 blocks, which won before fragments were read by
# ldmatrix. Through memory alone at 2,048, 5.9 us where the one for long caches takes 6.5. They come behind the first two.
ALSO: dict[str, tuple[dict[str, Scalar], ...]] = {
    "message": ({"path": "staged", "warps": 6, "unroll": 3}, {"path": "staged", "warps": 4, "unroll": 2, "splits": WIDE_CLUSTERS[1]},
                {"path": "whole", "warps": 4, "unroll": 4}, {"path": "lanes", "warps": 8, "unroll": 4}),
    "global": ({"path": "tensor", "warps": 4, "unroll": 2},)}
SECOND_TURN = 3  # messages of it: what merges through memory wins beside them at the longest caches alone, and one is for these
TURNS = 2  # of the other ways to merge before each schedule with a cluster's barrier, which won nowhere beside messages
# How stages are taken, warps and stages. Whole rounds of all splits are what a length costs (H200: 0.6 to 1.0 us for one that a single
# block has): 8 splits of 8 warps and 16 of 4 begin one at 1,024 positions and their multiples, 8 of 6 at 768. All stages of 8 splits of 4
# warps at once: alone 3.9 us at 2,048 positions with four, 4.2 at 2,080 with five, where one by one takes 4.3 and 5.1 (H200, 16x8x128).
STAGED = (("staged", 4, 2), ("staged", 8, 2), ("staged", 4, 4), ("staged", 6, 3), ("whole", 4, 4), ("staged", 8, 3), ("staged", 4, 3),
          ("whole", 8, 2), ("staged", 8, 1), ("staged", 5, 2), ("whole", 4, 5))
# Stages of at most so many bytes are narrow: heads of 64 channels in 16 bits. They want more of them, in more warps (H100, 32x8x64,
# 26,624 positions, whose bytes take 17.4 us: 12 warps with two through memory 21.9 us, 16 by messages 22.4, 8 take 25 at the best).
NARROW_BYTES = 4 << 10
NARROW_STAGED = (("staged", 4, 2), ("staged", 8, 4), ("staged", 12, 2), ("staged", 16, 2), ("staged", 8, 3), ("staged", 4, 4),
                 ("whole", 8, 4), ("staged", 8, 2))
NARROW_LONG: tuple[dict[str, Scalar], ...] = ({"path": "staged", "warps": 12, "unroll": 2}, {"path": "staged", "warps": 8, "unroll": 4})
NARROW_LONG_CLUSTERED: tuple[dict[str, Scalar], ...] = ({"path": "staged", "warps": 16, "unroll": 2}, *NARROW_LONG)
_Choice = tuple[str, int, int, int]  # path, warps, lanes, unroll
_Way = tuple[str, int]  # merge, splits
NAMES = ("path", "warps", "lanes", "unroll", "splits", "merge", "early_kv")


def space_of(shape: Shape, target: Target) -> ScheduleSpace:
    """At most 64 legal schedules, best guess first.

    Those whose blocks hold all query heads of a KV head have no parameter ``parts``. Groups beyond a fragment, and those that no block
    holds, are dealt to parts too, behind them; so are smaller groups where KV heads are few, one behind each two others.
    The ways to deal them take turns.
    """
    ways = _ways(shape, target)
    points = tuple(_in_order([points for _, points in ways], shape.group <= MOST_TENSOR_GROUP))
    names = (*NAMES, PARTS) if any(parts_of(point) > 1 for point in points) else NAMES
    parameters = tuple(Parameter(name=name, values=_values(points, name)) for name in names)
    ruled_out = sum((_ruled_out(one, target) for one, _ in ways), Counter())
    return ScheduleSpace(parameters=parameters, points=points, ruled_out=tuple(sorted(ruled_out.items())))


def _values(points: tuple[Schedule, ...], name: str) -> tuple[Scalar, ...]:
    return tuple(sorted({value for point in points for key, value in point.items if key == name}))


def _in_order(ways: list[list[Schedule]], mixed: bool) -> list[Schedule]:
    whole, *dealt = ways
    turns = [point for turn in zip_longest(*dealt) for point in turn if point is not None]
    if not mixed:
        return [*whole, *turns][:MOST_POINTS]
    pairs = iter(whole)
    return [point for three in zip_longest(pairs, pairs, turns) for point in three if point is not None][:MOST_POINTS]


def _ways(shape: Shape, target: Target) -> list[tuple[Shape, list[Schedule]]]:
    """The ways to deal the query heads, with the schedules of each: none to parts, then to the fewest parts first."""
    found = [(shape, _by_turns(shape, target))]
    busy = shape.kv_heads * CLUSTERS[0] * 2 > target.sm_count  # whole groups in clusters keep more than half of the SMs so
    if shape.group <= MOST_TENSOR_GROUP and found[0][1] and (busy or shape.group < LEAST_DEALT):
        return found
    for sizes in (PART_HEADS, (1,)):
        counts = dict.fromkeys(_even(shape.group, most) for most in sizes if most < shape.group)
        found += [(dealt, _by_turns(dealt, target)) for dealt in (evolve(shape, parts=count) for count in counts)]
        if any(points for _, points in found):
            break
    return found


def _even(group: int, most: int) -> int:
    """The fewest parts of at most ``most`` heads, so that none stays without: 9 heads in parts of 4 are 3, 3 and 3."""
    return -(-group // -(-group // -(-group // most)))


def _by_turns(shape: Shape, target: Target) -> list[Schedule]:
    """At most 64 schedules of one way to deal the query heads; two that keep K and V in registers for tensor cores, for each FMA
    schedule and each that keeps them in stages, where there are all of them.

    Messages and what merges through memory take turns, in the second one three to one: on the H200 8 splits took 3.0 us by messages at
    512 positions, 16 through memory 4.3, and a search that ends early has to have met both. So has it one of each for long caches,
    which is chosen again in later ranges of positions; of those merged through memory it comes first where there are clusters, which win
    at few positions (H100: 47 us at 32,768, where the best of a cluster takes 56).
    """
    everything = [tensor_schedules(shape, target), lane_schedules(shape, target), staged_schedules(shape, target)]
    tensor, lanes, staged = map(iter, everything)
    mixed = (point for turn in zip_longest(tensor, staged, tensor, lanes) for point in turn if point is not None)
    kept = list(islice(dict.fromkeys(mixed), MOST_POINTS))  # narrow heads reach some of them in two ways
    clustered = any(point["merge"] in CLUSTERED for point in kept)
    every = [point for points in everything for point in points]
    message, memory, barrier = (_for_long_too(shape, [point for point in kept if point["merge"] == merge], every, clustered)
                                for merge in ("message", "global", "cluster"))
    return _in_turns(message, memory, barrier)[:MOST_POINTS]


def _in_turns(message: list[Schedule], memory: list[Schedule], barrier: list[Schedule]) -> list[Schedule]:
    late, found = iter(barrier), list[Schedule | None]()
    turns = [message[:1], message[1 : 1 + SECOND_TURN], *([point] for point in message[1 + SECOND_TURN :])]
    for number, (ahead, through_memory) in enumerate(zip_longest(turns, memory), 1):
        found += (*(ahead or ()), through_memory, next(late, None) if number % TURNS == 0 else None)
    return [point for point in (*found, *late) if point is not None]


def _for_long_too(shape: Shape, way: list[Schedule], everything: list[Schedule], clustered: bool) -> list[Schedule]:
    """The schedules of one way to merge: what is known to be ``FIRST``, in second place the one with as many splits that has most of K and
    V in flight; in first place where splits merge through memory beside ``clustered`` ways. Behind it comes what else won there."""
    if not way:
        return way
    alike = [point for point in everything if all(point[name] == way[0][name] for name in ("merge", "splits"))]
    wished = (*_narrow_long(way), *LONG) if _narrow(shape) else LONG
    guess, merge = _first_like(alike, wished), way[0]["merge"]
    ranges = [(alike if "splits" not in one else [point for point in everything if point["merge"] == merge], one)
              for one in ALSO.get(str(merge), ())]
    also = [found for found in (_first_like(points, (one,)) for points, one in ranges) if found is not None]
    ahead = _first_like(alike, (FIRST[str(merge)],)) if merge in FIRST else None
    for_long_first = clustered and merge not in CLUSTERED and guess is not None
    first = (guess, *also, way[0]) if for_long_first else (ahead or way[0], guess, way[0], *also)
    return list(dict.fromkeys(point for point in (*first, *way[1:]) if point is not None))


def _first_like(points: list[Schedule], wished: Sequence[dict[str, Scalar]]) -> Schedule | None:
    return next((point for wanted in wished for point in points if all(point[name] == value for name, value in wanted.items())), None)


def _narrow(shape: Shape) -> bool:
    return bytes_of_stages(shape, "staged", 1, 1) <= NARROW_BYTES


def _narrow_long(way: list[Schedule]) -> tuple[dict[str, Scalar], ...]:
    return NARROW_LONG_CLUSTERED if way[0]["merge"] in CLUSTERED else NARROW_LONG


def lane_schedules(shape: Shape, target: Target) -> list[Schedule]:
    """FMA schedules: a group of ``lanes`` lanes owns a position, ``unroll`` positions in flight."""
    return _with_merges(shape, target, [choice for choice in _lane_choices(shape) if _fits_registers(shape, choice, target)])


def _lane_choices(shape: Shape) -> list[_Choice]:
    widest = min(WARP, 1 << (shape.head_vectors - 1).bit_length())
    groups = dict.fromkeys((widest, max(1, widest // 2)))  # a head of one vector has one lane at the most
    return [("lanes", warps, lanes, unroll) for unroll, lanes, warps in product((4, 2, 1), groups, (8, 4, 16))]


def tensor_schedules(shape: Shape, target: Target) -> list[Schedule]:
    """Tensor-core schedules: a warp owns 16 positions at a time, ``unroll`` of these steps in flight."""
    return _with_merges(shape, target, [choice for choice in _tensor_choices(shape) if _fits_registers(shape, choice, target)])


def _tensor_choices(shape: Shape) -> list[_Choice]:
    if shape.dtype is DType.F32 or shape.block_heads > MOST_TENSOR_GROUP:
        return []
    return [("tensor", warps, 4, unroll) for warps, unroll in ((4, 1), (8, 1), (2, 1), (4, 2), (8, 2), (2, 2), (16, 1))]


def staged_schedules(shape: Shape, target: Target) -> list[Schedule]:
    """Tensor-core schedules whose warps stream their positions through shared memory; ``unroll`` stages of 16 positions for each warp."""
    return _with_merges(shape, target, [choice for choice in _staged_choices(shape) if _fits_registers(shape, choice, target)])


def _staged_choices(shape: Shape) -> list[_Choice]:
    if not _tensor_choices(shape):
        return []
    return [(path, warps, 4, stages) for path, warps, stages in (NARROW_STAGED if _narrow(shape) else STAGED)]


def _fits_registers(shape: Shape, choice: _Choice, target: Target) -> bool:
    path, warps, lanes, unroll = choice
    return registers(shape, path, lanes, unroll) <= most_registers(warps * WARP, target)


def _ruled_out(shape: Shape, target: Target) -> Counter[str]:
    """How many ways to deal out the work within a block, with how many ways to merge, do not fit, by the reason."""
    found: Counter[str] = Counter()
    for choice in (*_lane_choices(shape), *_tensor_choices(shape), *_staged_choices(shape)):
        ways = [(merge, splits) for splits, merge, _ in _merges(shape, target)]
        if not _fits_registers(shape, choice, target):
            found[REGISTERS] += len(ways)
            continue
        fitting = [way for way in ways if _fits_shared(shape, choice, way, target)]
        found[SHARED] += len(ways) - len(fitting)
        found[FEW_BLOCKS] += sum(not _fits_twice(shape, choice, way, target) for way in fitting)
    return +found


def schedule(path: str, warps: int, lanes: int, unroll: int, splits: int, merge: str = "global",
             early_kv: bool = False) -> Schedule:
    """One schedule."""
    return Schedule({"path": path, "warps": warps, "lanes": lanes, "unroll": unroll, "splits": splits, "merge": merge,
                     "early_kv": early_kv})


def with_parts(whole: Schedule, parts: int) -> Schedule:
    """The schedule for a KV head's query heads dealt to so many parts."""
    return Schedule({**dict(whole.items), PARTS: parts}) if parts > 1 else whole


def _with_merges(shape: Shape, target: Target, choices: list[_Choice]) -> list[Schedule]:
    """Every choice with every way to split and merge that fits, those that come early in both lists first."""
    ranked: list[tuple[int, Schedule]] = []
    for splits, merge, rank in _merges(shape, target):
        for place, (path, warps, lanes, unroll) in enumerate(choices):
            tile = tile_of(path, warps, lanes, unroll)
            choice, way = (path, warps, lanes, unroll), (merge, splits)
            fits = _fits_shared(shape, choice, way, target) and _fits_twice(shape, choice, way, target)
            if fits and (splits == 1 or splits // 2 * tile < shape.capacity):
                ranked += [(rank + place + LATE * turn, with_parts(schedule(path, warps, lanes, unroll, splits, merge, early), shape.parts))
                           for turn, early in enumerate(_early(merge, target))]
    return [point for _, point in sorted(ranked, key=lambda item: item[0])]


def _early(merge: str, target: Target) -> tuple[bool, ...]:
    """Cluster barriers only with the better guess: messages, which wait for less, have their place with the other one."""
    early_kv = EARLY_KV if target.has(Feature.GRIDDEPCONTROL) else (False,)
    return early_kv[:1] if merge == "cluster" else early_kv


def _merges(shape: Shape, target: Target) -> list[tuple[int, str, int]]:
    """Splits per part of a KV head, how they merge, and the rank of both: about one block per SM first, or per 32 positions where
    those are fewer."""
    blocks = min(target.sm_count // (shape.kv_heads * shape.parts), -(-shape.capacity // 32))
    even = 1 << max(0, blocks.bit_length() - 1)
    through_memory = [(splits, ("global",)) for splits in dict.fromkeys((even, max(1, even // 2), even * 2, max(1, even // 4)))]
    clusters = [(splits, CLUSTERED) for splits in _clusters(shape, target)]
    by_turns = [one for pair in zip_longest(through_memory, clusters) for one in pair if one is not None]
    return [(splits, merge, rank) for rank, (splits, merges) in enumerate(by_turns) for merge in merges]


def _clusters(shape: Shape, target: Target) -> tuple[int, ...]:
    """Blocks of a cluster, those that are worth trying first in front."""
    if not target.has(Feature.CLUSTER):
        return ()
    wide = target.has(Feature.LARGE_CLUSTER) and shape.kv_heads * shape.parts * WIDE_CLUSTERS[1] <= target.sm_count
    return WIDE_CLUSTERS if wide else CLUSTERS


def _fits_shared(shape: Shape, choice: _Choice, way: _Way, target: Target) -> bool:
    path, warps, _, unroll = choice
    static = static_bytes(shape, path, warps, *way)
    shared = static + bytes_of_stages(shape, path, warps, unroll)
    return static <= STATIC_SHARED_BYTES and shared <= target.shared_bytes_per_block


def _fits_twice(shape: Shape, choice: _Choice, way: _Way, target: Target) -> bool:
    """Whether two blocks share an SM, where a cluster needs that."""
    (path, warps, lanes, unroll), (merge, splits) = choice, way
    shared = static_bytes(shape, path, warps, *way) + bytes_of_stages(shape, path, warps, unroll) + SHARED_RESERVED_PER_BLOCK
    held = registers(shape, path, lanes, unroll) * warps * WARP
    needed = merge in CLUSTERED and splits > CLUSTERS[0]
    return not needed or (2 * shared <= target.shared_bytes_per_sm and 2 * held <= target.registers_per_sm)
