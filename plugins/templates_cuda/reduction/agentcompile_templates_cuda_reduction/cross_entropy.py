"""Cross entropies: the schedules of ``cross_entropy`` matches, and what they are lowered to."""

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
    null,
    pointer,
)

from .scan import Plan, Point

FOLDER = Path(__file__).parent
DTYPES = (DType.F16, DType.BF16, DType.F32)
REDUCTIONS = ("none", "mean", "sum")
WARP = 32
ADDING = 1024  # threads of the second launch
LARGEST = 2**31 - 1
MOST_COUNTED = 2**24  # rows that a float counts
LOG_OF_EXPONENTIALS = 9  # as reduction::Operation in states.cuh


def cross_entropy_answer(match: Match) -> Literal[True] | Reject:
    """True for float scores, int64 classes, and rows that a float can count."""
    wrong = inputs_reject(match)
    if wrong is not None:
        return wrong
    if match.text("op") not in REDUCTIONS:
        return Reject(f"unknown reduction {match.text('op')!r}; served are {', '.join(REDUCTIONS)}")
    if match.need("out").spec.dtype not in DTYPES or match.need("classes").spec.dtype is not DType.I64:
        return Reject("results are float16, bfloat16 or float32, and classes int64; others are not served")
    if match.integer("rows") > MOST_COUNTED or match.integer("columns") > LARGEST // 2 or abs(match.integer("ignored")) > LARGEST:
        return Reject(f"{match.integer('rows')} rows of {match.integer('columns')} scores; served are 2^24 rows of 2^30")
    return True


def cross_entropy_points(match: Match, target: Target) -> list[Point]:
    """A warp per row first where rows are short, else a block."""
    columns, step = match.integer("columns"), step_of(match)
    blocks: list[Point] = [{"path": "cross_entropy", "threads": t, "warps_per_row": t // WARP} for t in (256, 512, 128, 1024)
                           if t == 128 or t * step <= 2 * columns]
    warp: list[Point] = [{"path": "cross_entropy", "threads": t, "warps_per_row": 1} for t in (128, 256)]
    return [*warp, *blocks] if columns <= WARP * step * 4 else [*blocks, *(warp[:1] if columns <= WARP * step * 32 else [])]


def lower_cross_entropy(match: Match, schedule: Schedule, target: Target) -> StepSource:
    """One launch; of a mean or a sum two with a workspace."""
    pdl, threads, warps_per_row = target.has(Feature.GRIDDEPCONTROL), schedule.integer("threads"), schedule.integer("warps_per_row")
    rows, columns, added = match.integer("rows"), match.integer("columns"), match.text("op") != "none"
    ignored, classes = i32("ignored", match.integer("ignored")), operand_pointer(match, "classes")
    per_thread = -(-columns // (WARP * warps_per_row * step_of(match)))
    results = (null("out"), pointer("ws_losses", Role.WORKSPACE, DType.F32, Access.WRITE)) if added else (
        operand_pointer(match, "out"), null("ws_losses"))
    launches = [Launch(
        entry="cross_entropy_kernel", grid=(-(-rows // (threads // WARP // warps_per_row)), 1, 1), block=(threads, 1, 1), pdl=pdl,
        arguments=(*inputs_arguments(match), classes, *results, i64("rows", rows), i32("columns", columns), ignored,
                   *inputs_periods(match)))]
    if added:
        launches.append(Launch(
            entry="cross_entropy_add_kernel", grid=(1, 1, 1), block=(ADDING, 1, 1), pdl=pdl,
            arguments=(pointer("ws_losses", Role.WORKSPACE, DType.F32), classes, operand_pointer(match, "out"), i64("rows", rows),
                       ignored)))
    plan: Plan = {"T": c_type(match.need("out").spec.dtype), **inputs_plan(match, rows * columns), "operation": LOG_OF_EXPONENTIALS,
                  "root": False, "has_out": True, "has_indices": False, "step": step_of(match), "threads": threads,
                  "warps_per_row": warps_per_row, "unroll": min(4, per_thread), "added": added, "mean": match.text("op") == "mean",
                  "pdl": pdl}
    return make_source(FOLDER / "cross_entropy.cu", plan=plan, launches=launches, features=[Feature.GRIDDEPCONTROL] * pdl,
                       workspaces=[Workspace(name="ws_losses", nbytes=4 * rows)] if added else [],
                       epilogue=elementwise_struct(match.epilogue, len(pointwise_inputs(match))),
                       reduction_depth=per_thread * step_of(match) + 10)
