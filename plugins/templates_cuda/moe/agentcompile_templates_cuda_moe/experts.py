"""The experts family: linear layers of the experts chosen for one token, as weight streams of their matrices alone."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import block_needs, c_type, epilogue_struct, make_source, operand_pointer
from attrs import frozen

from agentcompile_core.plugin_api import (
    EXPERT_LINEAR,
    ContractError,
    DType,
    Feature,
    Launch,
    Match,
    Needs,
    Parameter,
    Reject,
    Schedule,
    ScheduleSpace,
    StepSource,
    Target,
    TemplateFamily,
    f32,
    i32,
)

from . import columns_space, stream_space
from .choosing import DTYPES, choice_facts, choice_problem, choice_types
from .space import (
    GRID_LIMIT,
    MOST_SLOTS,
    STATIC_SHARED_BYTES,
    WARP_SIZE,
    Shape,
    grid_of,
    registers,
    schedules,
    shape_of,
    shared_bytes,
    tile_of,
)

FOLDER = Path(__file__).parent
POINTERS = ("x", "weight", "experts", "bias", "scale", "aux0", "aux1", "out", "logits", "router_bias", "scores", "choice")


class ExpertsFamily(TemplateFamily):
    """``expert_linear`` matches: gate and up with their activation, or down with the weighted sum over the slots."""

    name = "experts"
    version = 4

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True for matrices in float16, bfloat16 or float32, row by row or column by column, and at most 32 slots."""
        if match.kind != EXPERT_LINEAR:
            return Reject(f"experts serves {EXPERT_LINEAR} matches, not {match.kind}")
        reason = _problem(match)
        if reason:
            return Reject(reason)
        try:
            epilogue_struct(match.epilogue, match.integer("pair", 1), _aux_count(match))
        except ContractError as exc:
            return Reject(str(exc))
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """At most 144 schedules, of the templates that read matrices as they lie; where rows stream, two of these for each other one."""
        shape = shape_of(match)
        if match.flag("transposed"):
            columns = columns_space.schedules(shape, match.flag("interleaved"), target)
            return ScheduleSpace(parameters=_parameters(columns), points=columns)
        points = _taking_turns(stream_space.schedules(shape, target), schedules(shape, target), stream_space.comes_first(shape, target))
        return ScheduleSpace(parameters=_parameters(points), points=points, ruled_out=stream_space.ruled_out(shape, target))

    def needs(self, match: Match, schedule: Schedule, target: Target) -> Needs:
        """Shared memory, and registers where matrices lie row by row and are loaded into them."""
        shape, threads = shape_of(match), schedule.integer("warps") * WARP_SIZE
        if match.flag("transposed"):
            shared = columns_space.shared_bytes(shape, schedule, match.flag("interleaved"))
            return block_needs(target, threads=threads, shared_bytes=shared + STATIC_SHARED_BYTES)
        if _streams(schedule):
            shared = stream_space.shared_bytes(shape, schedule, target)
            return block_needs(target, threads=threads + WARP_SIZE, shared_bytes=shared + stream_space.STATIC_SHARED_BYTES)
        return block_needs(target, threads=threads, registers=registers(shape, schedule),
                           shared_bytes=shared_bytes(shape, schedule) + STATIC_SHARED_BYTES)

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch, no workspace."""
        shape = shape_of(match)
        pdl = target.has(Feature.GRIDDEPCONTROL)
        chosen = _chosen(match, shape, schedule, target)
        threads = (schedule.integer("warps") + chosen.producers) * WARP_SIZE
        sizes = (i32("n", shape.n), i32("k", shape.k), i32("slots", shape.slots), i32("matrices", match.integer("experts")),
                 f32("eps", match.number("eps", 0.0)), f32("factor", match.number("factor", 1.0)))
        launch = Launch(entry="experts_kernel", grid=chosen.grid, block=(threads, 1, 1), cluster=chosen.cluster, pdl=pdl,
                        shared_bytes=chosen.shared_bytes,
                        arguments=(*(operand_pointer(match, name) for name in POINTERS), *sizes))
        features = [Feature.GRIDDEPCONTROL] * pdl + [Feature.BULK_COPY, Feature.MBARRIER] * chosen.producers
        features += [Feature.CLUSTER] * (chosen.cluster > 1)
        plan = {"pdl": pdl, "threads": threads, **chosen.plan, **_types(match), **_facts(match, shape)}
        return make_source(FOLDER / chosen.template, plan=plan, launches=(launch,), features=features,
                           epilogue=epilogue_struct(match.epilogue, shape.pair, _aux_count(match)), reduction_depth=chosen.depth)


@frozen(kw_only=True)
class _Chosen:
    """What a template makes of a schedule: its grid, its dynamic shared memory, constants of its own and the terms that a lane adds."""

    template: str
    grid: tuple[int, int, int]
    shared_bytes: int
    plan: dict[str, bool | int]
    depth: int
    producers: int = 0  # warps that only fill the ring
    cluster: int = 1  # blocks that send each other sums


def _taking_turns(streams: Sequence[Schedule], others: Sequence[Schedule], first: bool) -> tuple[Schedule, ...]:
    """Two streams for each other schedule, or, where they do not come first, one behind each."""
    rest = iter(streams)
    turns = zip_longest(zip_longest(rest, rest), others) if first else zip_longest(others, zip(rest, strict=False))
    flat = [point for turn in turns for side in turn for point in (side if isinstance(side, tuple) else (side,))]
    return tuple(point for point in flat if point is not None)


def _parameters(points: Sequence[Schedule]) -> tuple[Parameter, ...]:
    """Every name of any point, with the values that it has."""
    values: dict[str, set[bool | int | str]] = {}
    for point in points:
        for name, value in point.items:
            values.setdefault(name, set()).add(value)
    return tuple(Parameter(name=name, values=tuple(sorted(found))) for name, found in values.items())  # type: ignore[type-var]


def _streams(schedule: Schedule) -> bool:
    return dict(schedule.items).get("path") == stream_space.PATH


def _chosen(match: Match, shape: Shape, schedule: Schedule, target: Target) -> _Chosen:
    if match.flag("transposed"):
        return _columns(match, shape, schedule)
    return _stream(match, shape, schedule, target) if _streams(schedule) else _rows(match, shape, schedule)


def _stream(match: Match, shape: Shape, schedule: Schedule, target: Target) -> _Chosen:
    plan: dict[str, bool | int] = {name: schedule.integer(name) for name in stream_space.SIZES}
    plan |= {name: bool(schedule[name]) for name in stream_space.ORDERS}
    return _Chosen(template="experts_stream.cu", grid=stream_space.grid_of(shape, schedule, target),
                   shared_bytes=stream_space.shared_bytes(shape, schedule, target), producers=1,
                   plan={**plan, "full_stages": shape.k % schedule.integer("columns") == 0}, depth=stream_space.reduction_depth(shape))


def _rows(match: Match, shape: Shape, schedule: Schedule) -> _Chosen:
    plan: dict[str, bool | int] = {name: schedule.integer(name) for name in ("warps", "rows", "unroll")}
    return _Chosen(template="experts.cu", grid=grid_of(shape, schedule), shared_bytes=shared_bytes(shape, schedule),
                   plan={**plan, "tile": tile_of(shape, schedule), "vectors": shape.vectorized},
                   depth=-(-shape.k // WARP_SIZE) + 5 + shape.slots_of_block)


def _columns(match: Match, shape: Shape, schedule: Schedule) -> _Chosen:
    interleaved, tile = match.flag("interleaved"), columns_space.tile_of(shape, schedule)
    groups, split = schedule.integer("warps") * WARP_SIZE // schedule.integer("lanes"), schedule.integer("split")
    grid = (-(-columns_space.width_of(shape, interleaved) // tile) * split, 1 if shape.summed else shape.slots, 1)
    plan: dict[str, bool | int] = {name: schedule.integer(name) for name in ("lanes", "unroll", "split")}
    return _Chosen(template="experts_columns.cu", grid=grid, shared_bytes=columns_space.shared_bytes(shape, schedule, interleaved),
                   plan={**plan, "tile": tile, "vectors": columns_space.is_vectorized(shape)},
                   depth=-(-shape.slots_of_block * shape.k // (groups * split)) + 6 + schedule.integer("warps") + split, cluster=split)


def _types(match: Match) -> dict[str, str]:
    scale = match.operand("scale")
    element = match.need("weight").spec.dtype
    return {"T": c_type(element), "Out": c_type(match.need("out").spec.dtype), "Scale": c_type(scale.spec.dtype if scale else element),
            **choice_types(match, "router_bias")}


def _facts(match: Match, shape: Shape) -> dict[str, bool | int]:
    return {"pair": shape.pair, **{name: match.flag(name) for name in ("interleaved", "shared", "summed")},
            **{f"has_{name}": match.operand(name) is not None for name in ("bias", "aux0", "aux1")},
            "routed": match.flag("routed"), **(choice_facts(match, "router_bias") if match.flag("routed") else {})}


def _aux_count(match: Match) -> int:
    return max((index + 1 for index in (0, 1) if match.operand(f"aux{index}") is not None), default=0)


def _problem(match: Match) -> str:
    element = match.need("weight").spec.dtype
    allowed = ", ".join(dtype.value for dtype in DTYPES)
    if element not in DTYPES or match.need("out").spec.dtype not in DTYPES:
        return f"weights are {element.value} and the result {match.need('out').spec.dtype.value}; experts serves {allowed}"
    n, k, slots, pair = (match.integer(name) for name in ("n", "k", "slots", "pair"))
    if not 1 <= slots <= MOST_SLOTS:
        return f"{slots} experts are chosen; experts serves 1 to {MOST_SLOTS}"
    if pair not in (1, 2) or (pair == 2 and match.flag("summed")):
        return f"pair is {pair}; experts combines at most two rows, and none of those that it sums over slots"
    if min(n, k) < 1 or max(n * pair, k) > GRID_LIMIT:
        return f"n={n}, k={k}: both must be positive 32-bit integers"
    if match.flag("routed"):
        reason = "sums have their router before gate and up" if match.flag("summed") else choice_problem(match, "router_bias", "choice")
        if reason:
            return reason
    elif match.operand("experts") is None:
        return "the match has no operand 'experts'"
    if match.flag("summed") != (match.operand("scale") is not None):
        return "what is summed needs an operand scale, and nothing else may have one"
    return _operand_problem(match, element)


def _operand_problem(match: Match, element: DType) -> str:
    for operand in match.operands:
        if operand.spec.strides:
            return f"operand {operand.name} is not contiguous"
        if operand.name in ("logits", "router_bias", "scores", "choice"):
            continue  # choice_problem has seen them
        dtypes = {"out": DTYPES, "experts": (DType.I64,), "scale": (element, DType.F32)}.get(operand.name, (element,))
        if operand.spec.dtype not in dtypes:
            return f"operand {operand.name} is {operand.spec.dtype.value}; {', '.join(dtype.value for dtype in dtypes)} is served"
    return ""
