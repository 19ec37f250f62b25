"""Running sums and products: the schedules of ``scan`` matches, and what they are lowered to."""

from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import c_type, elementwise_struct, make_source, operand_pointer
from agentcompile_cuda_kit.pointwise_inputs import (
    inputs_arguments,
    inputs_periods,
    inputs_plan,
    inputs_reject,
    pointwise_inputs,
    step_of,
)

from agentcompile_core.plugin_api import (
    Access,
    DType,
    Feature,
    Launch,
    Match,
    Reject,
    Role,
    Schedule,
    StepSource,
    Target,
    Workspace,
    i32,
    i64,
    pointer,
)

FOLDER = Path(__file__).parent
DTYPES = (DType.F16, DType.BF16, DType.F32)
OPERATIONS = {"sum": False, "prod": True}
WARP = 32
LARGEST = 2**31 - 1
MOST_ROWS = 65535  # of a grid's second axis
SHORTEST_PART = 4096  # elements that pay for a block and for being read twice
MOST_ELEMENTS, MOST_OF_PART = 16, 8  # of a lane in a turn of a row; more of a part were spilled on some targets
LINES = 4  # of a warp in a turn along an axis that is not the last
WAVES = (1, 2, 4)  # blocks per SM that parts make

Point = dict[str, int | str]
Plan = dict[str, bool | int | float | str]


def scan_answer(match: Match) -> Literal[True] | Reject:
    """True for float inputs and results in any mix, and lengths that a grid can count."""
    wrong = inputs_reject(match)
    if wrong is not None:
        return wrong
    if match.text("op") not in OPERATIONS:
        return Reject(f"unknown operation {match.text('op')!r}; served are {', '.join(OPERATIONS)}")
    if match.need("out").spec.dtype not in DTYPES:
        return Reject("results are float16, bfloat16 or float32; others are not served")
    outer, columns, inner = (match.integer(name) for name in ("outer", "columns", "inner"))
    if outer * -(-inner // WARP) > LARGEST or columns > LARGEST // 2:
        return Reject(f"{outer} x {columns} x {inner} elements: more lines than a grid has blocks, or a line beyond 2^30")
    return True


def scan_points(match: Match, target: Target) -> list[Point]:
    """A warp or a block per row, few long rows in parts; or an axis that is not the last."""
    return _strided(match) if match.integer("inner") > 1 else _rows(match, target)


def _step(match: Match) -> int:
    return step_of(match, match.need("out").spec.dtype)


def _rows(match: Match, target: Target) -> list[Point]:
    rows, columns, step = match.integer("outer"), match.integer("columns"), _step(match)
    threads = [t for t in (256, 512, 128, 1024) if t == 128 or t * step <= 2 * columns]
    blocks: list[Point] = [{"path": "scan", "threads": t, "warps_per_row": t // WARP, "splits": 1} for t in threads]
    warp: list[Point] = [{"path": "scan", "threads": t, "warps_per_row": 1, "splits": 1} for t in (128, 256)]
    parts: list[Point] = []
    if rows < min(2 * target.sm_count, MOST_ROWS):
        most = columns // SHORTEST_PART
        splits = {min(-(-waves * target.sm_count // rows), most) for waves in WAVES}
        parts = [{"path": "scan", "threads": t, "warps_per_row": t // WARP, "splits": s}
                 for t in (256, 512) for s in sorted((s for s in splits if s > 1), reverse=True)]
    short = columns <= WARP * step * 4
    return [*parts, *([*warp, *blocks] if short else [*blocks, *(warp[:1] if columns <= WARP * step * 32 else [])])]


def _strided(match: Match) -> list[Point]:
    columns, inner, vector = match.integer("columns"), match.integer("inner"), _step(match)
    steps = (vector, 1) if inner >= WARP * vector // 2 else (1,)
    return [{"path": "scan_strided", "warps": warps, "step": step} for step in steps for warps in (8, 4, 16, 1)
            if warps == 1 or warps * LINES <= 2 * columns]


def lower_scan(match: Match, schedule: Schedule, target: Target) -> StepSource:
    """One launch; two with a workspace where rows are dealt out in parts."""
    pdl = target.has(Feature.GRIDDEPCONTROL)
    return _lower_strided(match, schedule, pdl) if schedule["path"] == "scan_strided" else _lower_rows(match, schedule, pdl)


def _plan(match: Match, step: int, pdl: bool) -> Plan:
    count = match.need("out").spec.numel
    return {"T": c_type(match.need("out").spec.dtype), **inputs_plan(match, count), "product": OPERATIONS[match.text("op")],
            "reverse": match.flag("reverse"), "step": step, "pdl": pdl}


def _source(match: Match, template: str, plan: Plan, launches: list[Launch], workspaces: list[Workspace], depth: int) -> StepSource:
    return make_source(FOLDER / template, plan=plan, launches=launches, workspaces=workspaces, reduction_depth=depth,
                       epilogue=elementwise_struct(match.epilogue, len(pointwise_inputs(match))),
                       features=[Feature.GRIDDEPCONTROL] * launches[0].pdl)


def _lower_rows(match: Match, schedule: Schedule, pdl: bool) -> StepSource:
    threads, warps_per_row, splits = (schedule.integer(name) for name in ("threads", "warps_per_row", "splits"))
    rows, columns, step = match.integer("outer"), match.integer("columns"), _step(match)
    part = -(-columns // (splits * step)) * step
    splits = -(-columns // part)
    per_lane = -(-part // (WARP * warps_per_row * step))
    vectors = max(1, min((MOST_ELEMENTS if splits == 1 else MOST_OF_PART) // step, per_lane))
    plan = {**_plan(match, step, pdl), "threads": threads, "warps_per_row": warps_per_row, "vectors": vectors}
    depth = per_lane * step + splits + 8
    if splits == 1:
        grid = (-(-rows // (threads // WARP // warps_per_row)), 1, 1)
        arguments = (*inputs_arguments(match), operand_pointer(match, "out"), i64("rows", rows), i32("columns", columns),
                     *inputs_periods(match))
        return _source(match, "scan.cu", plan, [Launch(entry="scan_kernel", grid=grid, block=(threads, 1, 1), pdl=pdl,
                                                       arguments=arguments)], [], depth)
    sizes = (i32("columns", columns), i32("part", part), *inputs_periods(match))
    kept = Workspace(name="ws_totals", nbytes=4 * splits * rows)
    grid, block = (splits, rows, 1), (threads, 1, 1)
    first = Launch(entry="scan_parts_kernel", grid=grid, block=block, pdl=pdl,
                   arguments=(*inputs_arguments(match), pointer("ws_totals", Role.WORKSPACE, DType.F32, Access.WRITE), *sizes))
    second = Launch(entry="scan_write_kernel", grid=grid, block=block, pdl=pdl,
                    arguments=(*inputs_arguments(match), pointer("ws_totals", Role.WORKSPACE, DType.F32), operand_pointer(match, "out"),
                               *sizes))
    return _source(match, "scan.cu", plan, [first, second], [kept], depth)


def _lower_strided(match: Match, schedule: Schedule, pdl: bool) -> StepSource:
    warps, step = schedule.integer("warps"), schedule.integer("step")
    columns, inner = match.integer("columns"), match.integer("inner")
    tiles = -(-inner // (WARP * step))
    launch = Launch(
        entry="scan_strided_kernel", grid=(match.integer("outer") * tiles, 1, 1), block=(WARP * warps, 1, 1), pdl=pdl,
        arguments=(*inputs_arguments(match), operand_pointer(match, "out"), i32("columns", columns), i64("inner", inner),
                   i32("tiles", tiles), *inputs_periods(match)))
    plan = {**_plan(match, step, pdl), "warps": warps, "lines": LINES}
    return _source(match, "scan_strided.cu", plan, [launch], [], -(-columns // warps) + warps)
