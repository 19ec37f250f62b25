"""The reduction family: sums, means, extremes, products, norms, variances and places of extremes, along any neighbouring axes."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import c_type, elementwise_struct, known_length, make_source, operand_pointer
from agentcompile_cuda_kit.pointwise_inputs import (
    are_few,
    inputs_arguments,
    inputs_periods,
    inputs_plan,
    inputs_reject,
    pointwise_inputs,
    step_of,
)
from attrs import frozen

from agentcompile_core.plugin_api import (
    CROSS_ENTROPY,
    POOL,
    REDUCTION,
    SCAN,
    Access,
    DType,
    Feature,
    KernelArgument,
    Launch,
    Match,
    Parameter,
    Reject,
    Role,
    Schedule,
    ScheduleSpace,
    StepSource,
    Target,
    TemplateFamily,
    Workspace,
    f32,
    i32,
    i64,
    null,
    pointer,
)

from .cross_entropy import cross_entropy_answer, cross_entropy_points, lower_cross_entropy
from .pool import lower_pool, pool_answer, pool_points
from .scan import lower_scan, scan_answer, scan_points

FOLDER = Path(__file__).parent
DTYPES = (DType.F16, DType.BF16, DType.F32)
WARP = 32
FINISHING = 128  # threads of a block of the second launch
LARGEST = 2**31 - 1
MOST_SPLITS = 65535
FETCHED = (4, 2, 8)  # vectors of 16 bytes that a thread has on their way, the best first
MOST_FETCHED = 32  # elements, for want of registers
LONG_ROW = 16384  # elements from which parts come first
SHORTEST_PART = 1024  # elements that pay for a block and a second launch
SHORTEST_STRIDED_PART = 64
MOST_WORDS = 16  # of the states of a lane
MOST_SHARED_BYTES = 32 << 10  # of the states of a block


@frozen(kw_only=True)
class Operation:
    """What an ``op`` of a match is to the kernels; ``words`` of 4 bytes are carried along per result."""

    number: int  # as reduction::Operation in states.cuh
    words: int = 1
    root: bool = False


OPERATIONS = {
    "sum": Operation(number=0), "mean": Operation(number=0), "amax": Operation(number=1), "amin": Operation(number=2),
    "prod": Operation(number=3), "l1": Operation(number=4), "l2": Operation(number=5, root=True),
    "var": Operation(number=6, words=3), "std": Operation(number=6, words=3, root=True),
    "max": Operation(number=7, words=2), "min": Operation(number=8, words=2),
    "logsumexp": Operation(number=9, words=2),
}
PLACES = ("max", "min")  # these have indices, with or without the values


@frozen(kw_only=True)
class Other:
    """How matches of another kind than reductions are served."""

    answer: Callable[[Match], Literal[True] | Reject]
    points: Callable[[Match, Target], list[dict[str, int | str]]]
    lower: Callable[[Match, Schedule, Target], StepSource]


OTHERS = {
    SCAN: Other(answer=scan_answer, points=scan_points, lower=lower_scan),
    POOL: Other(answer=pool_answer, points=pool_points, lower=lower_pool),
    CROSS_ENTROPY: Other(answer=cross_entropy_answer, points=cross_entropy_points, lower=lower_cross_entropy),
}


class ReductionFamily(TemplateFamily):
    """``reduction`` and ``scan`` matches: [outer, columns, inner], reduced over the middle axis, or run through along it; ``pool``
    and ``cross_entropy``."""

    name = "reduction"
    version = 1

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True for float inputs and results in any mix, int64 indices, and lengths that a grid can count."""
        if match.kind in OTHERS:
            return OTHERS[match.kind].answer(match)
        if match.kind != REDUCTION:
            return Reject(f"reduction serves {', '.join((REDUCTION, *OTHERS))} matches, not {match.kind}")
        wrong = inputs_reject(match) or _results_reject(match)
        if wrong is not None:
            return wrong
        outer, columns, inner = (match.integer(name) for name in ("outer", "columns", "inner"))
        if outer * -(-inner // WARP) > LARGEST or columns > LARGEST // 2:
            return Reject(f"{outer} x {columns} x {inner} elements: more results than a grid has blocks, or a row beyond 2^30")
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """At most 24 points: lanes, a warp or a block per row, rows in parts; or an axis that is not the last, whole or in parts."""
        points = _points(match, target)
        names = ("path", "threads", "warps_per_row", "lanes", "warps", "step", "splits", "items")
        parameters = tuple(Parameter(name=name, values=tuple(sorted({p[name] for p in points if name in p})))
                           for name in names if any(name in p for p in points))
        return ScheduleSpace(parameters=parameters, points=tuple(map(Schedule, points)))

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch; two with a workspace where the axis is split."""
        if match.kind in OTHERS:
            return OTHERS[match.kind].lower(match, schedule, target)
        lower = _lower_strided if schedule["path"] == "strided" else _lower_rows
        return lower(match, schedule, target.has(Feature.GRIDDEPCONTROL))


Point = dict[str, int | str]
Plan = dict[str, bool | int | float | str]


def _points(match: Match, target: Target) -> list[Point]:
    if match.kind in OTHERS:
        return OTHERS[match.kind].points(match, target)
    return _strided(match, target) if match.integer("inner") > 1 else _rows(match, target)


def _results_reject(match: Match) -> Reject | None:
    out, indices, op = match.operand("out"), match.operand("indices"), match.text("op")
    if op not in OPERATIONS:
        return Reject(f"unknown operation {op!r}; served are {', '.join(OPERATIONS)}")
    if (indices is not None and op not in PLACES) or (out is None and indices is None):
        return Reject(f"{op} has no indices, or nothing to write; {' and '.join(PLACES)} have indices")
    if (out is not None and out.spec.dtype not in DTYPES) or (indices is not None and indices.spec.dtype is not DType.I64):
        return Reject("results are float16, bfloat16 or float32, and indices int64; others are not served")
    return None


def _rows(match: Match, target: Target) -> list[Point]:
    """Parts first where rows alone leave SMs without work and are long; threads that have four vectors on their way each first."""
    rows, columns, step = match.integer("outer"), match.integer("columns"), _step(match)
    parts = [_block(columns // s, step, s, fetched) for s in _parts(rows, columns, target) for fetched in FETCHED[:2]]
    blocks = [_block(columns, step, 1, fetched) for fetched in (*FETCHED, 1)]
    warp: list[Point] = [{"path": "rows", "threads": t, "warps_per_row": 1, "lanes": WARP, "splits": 1} for t in (128, 256)]
    few = dict.fromkeys(_lanes(columns, step, fetched) for fetched in FETCHED)
    lanes: list[Point] = [{**point, "lanes": n} for point in warp[::-1] for n in few if n < WARP]
    long = [*blocks, *(warp[:1] if columns <= WARP * step * 32 else [])]
    whole = [*lanes, *warp, *blocks[:1]] if columns <= WARP * step * 4 else long
    found = [*parts, *whole] if columns >= LONG_ROW else [*whole, *parts]
    return list({tuple(sorted(point.items())): point for point in found}.values())


def _parts(rows: int, columns: int, target: Target) -> list[int]:
    """Parts per row that make at most two, one or four blocks per SM, where rows are fewer."""
    if rows >= 2 * target.sm_count:
        return []
    found = (min(waves * target.sm_count // rows, columns // SHORTEST_PART, MOST_SPLITS) for waves in (2, 1, 4))
    return [splits for splits in dict.fromkeys(found) if splits > 1]


def _block(columns: int, step: int, splits: int, fetched: int) -> Point:
    """A block per row or part of it, whose threads have ``fetched`` vectors each, as far as a block has as few or as many threads."""
    vectors = -(-columns // (step * fetched))
    threads = next((t for t in (128, 256, 512) if vectors <= t), 1024)
    return {"path": "rows", "threads": threads, "warps_per_row": threads // WARP, "lanes": WARP, "splits": splits}


def _lanes(columns: int, step: int, fetched: int) -> int:
    """Lanes per row of a warp that have ``fetched`` vectors each."""
    vectors = -(-columns // (step * fetched))
    return next((lanes for lanes in (4, 8, 16) if vectors <= lanes), WARP)


def _splits(blocks: int, most: int, target: Target) -> list[int]:
    """Parts that give every SM one, two or four blocks, where there are fewer."""
    if blocks >= 2 * target.sm_count:
        return []
    found = {min(-(-waves * target.sm_count // blocks), most, MOST_SPLITS) for waves in (1, 2, 4)}
    return sorted((splits for splits in found if splits > 1), reverse=True)


def _strided(match: Match, target: Target) -> list[Point]:
    """Vectors of 16 bytes per lane first where the lanes fill a warp with them, and where their states fit into registers."""
    outer, columns, inner = (match.integer(name) for name in ("outer", "columns", "inner"))
    vector, words = _step(match), OPERATIONS[match.text("op")].words
    points: list[Point] = []
    steps = (1,) if words * vector > MOST_WORDS else (vector, 1) if inner >= WARP * vector // 2 else (1, vector)
    for step in steps:
        blocks = outer * -(-inner // (WARP * step))
        for warps in (8, 4, 16, 1):
            fits = columns <= SHORTEST_STRIDED_PART if warps == 1 else 2 * warps <= columns
            if fits and warps * WARP * step * words * 4 <= MOST_SHARED_BYTES:
                splits = _splits(blocks, columns // SHORTEST_STRIDED_PART, target)[:2] if warps == 8 else []
                points += [{"path": "strided", "warps": warps, "step": step, "splits": s} for s in (*splits, 1)]
    return points


def _step(match: Match) -> int:
    return step_of(match)


def _plan(match: Match, step: int, splits: int, pdl: bool) -> Plan:
    operation, out = OPERATIONS[match.text("op")], match.operand("out")
    count = match.integer("outer") * match.integer("columns") * match.integer("inner")
    of = out if out is not None else match.need("in0")
    return {"T": c_type(of.spec.dtype), **inputs_plan(match, count), "operation": operation.number, "root": operation.root,
            "has_out": out is not None, "has_indices": match.operand("indices") is not None, "step": step, "split": splits > 1, "pdl": pdl}


def _scale(match: Match) -> KernelArgument:
    op, columns = match.text("op"), match.integer("columns")
    spread = op in ("var", "std")
    return f32("scale", columns - match.number("correction") if spread else 1.0 / columns if op == "mean" else 1.0)


def _results(match: Match, splits: int) -> tuple[KernelArgument, ...]:
    """out and indices where the first launch writes them, else the workspace of the parts' states."""
    if splits == 1:
        return operand_pointer(match, "out"), operand_pointer(match, "indices"), null("ws_states")
    return null("out"), null("indices"), pointer("ws_states", Role.WORKSPACE, DType.F32, Access.WRITE)


def _finished(match: Match, template: str, plan: Plan, first: Launch, depth: int) -> StepSource:
    """The source of one launch, with the second one behind it where there are parts (the grid's y)."""
    launches, workspaces, splits = [first], [], first.grid[1]
    if splits > 1:
        results = match.integer("outer") * match.integer("inner")
        launches.append(Launch(
            entry="reduction_finish_kernel", grid=(-(-results * WARP // FINISHING), 1, 1), block=(FINISHING, 1, 1), pdl=first.pdl,
            arguments=(pointer("ws_states", Role.WORKSPACE, DType.F32), operand_pointer(match, "out"), operand_pointer(match, "indices"),
                       i64("results", results), i32("splits", splits), _scale(match))))
        workspaces.append(Workspace(name="ws_states", nbytes=4 * OPERATIONS[match.text("op")].words * splits * results))
    return make_source(FOLDER / template, plan=plan, launches=launches, workspaces=workspaces, reduction_depth=depth + splits,
                       epilogue=elementwise_struct(match.epilogue, len(pointwise_inputs(match))),
                       features=[Feature.GRIDDEPCONTROL] * first.pdl)


def _lower_rows(match: Match, schedule: Schedule, pdl: bool) -> StepSource:
    threads, warps_per_row, lanes = (schedule.integer(name) for name in ("threads", "warps_per_row", "lanes"))
    threads_per_row = lanes * warps_per_row
    rows, columns, step = match.integer("outer"), match.integer("columns"), _step(match)
    part = -(-columns // (schedule.integer("splits") * step)) * step
    splits = -(-columns // part)
    launch = Launch(
        entry="reduction_kernel", grid=(-(-rows * threads_per_row // threads), splits, 1), block=(threads, 1, 1), pdl=pdl,
        arguments=(*inputs_arguments(match), *_results(match, splits), i64("rows", rows), i32("columns", columns), i32("part", part),
                   _scale(match), *inputs_periods(match)))
    steps = -(-part // (threads_per_row * step))
    unroll = next(count for count in (8, 4, 2, 1) if count <= steps and count * step <= MOST_FETCHED)
    known = known_length(columns)
    plan = {**_plan(match, step, splits, pdl), "threads": threads, "warps_per_row": warps_per_row, "lanes": lanes, "unroll": unroll,
            "columns": known, "part": part if known and known % part == 0 else 0, "past_l1": are_few(pointwise_inputs(match))}
    return _finished(match, "reduction.cu", plan, launch, steps * step + threads_per_row.bit_length())


def _lower_strided(match: Match, schedule: Schedule, pdl: bool) -> StepSource:
    warps, step, inner = schedule.integer("warps"), schedule.integer("step"), match.integer("inner")
    columns, tiles = match.integer("columns"), -(-inner // (WARP * step))
    part = -(-columns // schedule.integer("splits"))
    splits = -(-columns // part)
    launch = Launch(
        entry="reduction_strided_kernel", grid=(match.integer("outer") * tiles, splits, 1), block=(WARP * warps, 1, 1), pdl=pdl,
        arguments=(*inputs_arguments(match), *_results(match, splits), i32("columns", columns), i32("part", part), i64("inner", inner),
                   i32("tiles", tiles), _scale(match), *inputs_periods(match)))
    light = OPERATIONS[match.text("op")].words == 1  # of heavier states fewer elements are in flight, for want of registers
    plan = {**_plan(match, step, splits, pdl), "warps": warps, "unroll": 4 if light and part >= 4 * warps else 1}
    return _finished(match, "reduction_strided.cu", plan, launch, -(-part // warps) + warps)
