"""The softmax family: softmax and log-softmax along any axis, of scores that may be scaled and masked on the way."""

from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import c_type, elementwise_struct, known_length, make_source
from agentcompile_cuda_kit.pointwise_inputs import (
    are_few,
    inputs_arguments,
    inputs_periods,
    inputs_plan,
    inputs_reject,
    pointwise_inputs,
    step_of,
)

from agentcompile_core.plugin_api import (
    SOFTMAX,
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
    i32,
    i64,
    pointer,
)

FOLDER = Path(__file__).parent
DTYPES = (DType.F16, DType.BF16, DType.F32)
WARP = 32
HELD_VALUES = 32  # scores that a thread keeps in registers
OTHER_REGISTERS = 16  # of a thread, beside its scores
LARGEST_GRID = 2**31 - 1
MOST_SPLIT_ROWS = 65535  # rows are the second dimension of that grid
LONG_ROW = 16384  # scores from which parts come first
SHORTEST_PART = 1024  # elements of a row that pay for a block and a second launch


class SoftmaxFamily(TemplateFamily):
    """``softmax`` matches: [outer, columns, inner], normalized over the middle axis."""

    name = "softmax"
    version = 1

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True for float16, bfloat16 and float32 in any mix, and any lengths that a grid can count."""
        if match.kind != SOFTMAX:
            return Reject(f"softmax serves {SOFTMAX} matches, not {match.kind}")
        wrong = inputs_reject(match)
        if wrong is not None:
            return wrong
        out = match.need("out").spec.dtype
        if out not in DTYPES:
            return Reject(f"the result is {out.value}; float16, bfloat16 and float32 are served")
        outer, columns, inner = (match.integer(name) for name in ("outer", "columns", "inner"))
        if max(outer * -(-inner // WARP), columns) > LARGEST_GRID:
            return Reject(f"{outer} x {columns} x {inner} elements: more rows than a grid has blocks, or a row beyond 32 bits")
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """At most 20 points: rows in registers, rows of any length, rows in parts; or an axis that is not the last."""
        parts, rows = _split(match, target), _rows(match, target)
        whole = [*parts, *rows] if match.integer("columns") >= LONG_ROW else [*rows, *parts]
        points = _strided(match) if match.integer("inner") > 1 else whole
        names = sorted({name for point in points for name in point})
        parameters = tuple(Parameter(name=name, values=tuple(sorted({p[name] for p in points if name in p}))) for name in names)
        return ScheduleSpace(parameters=parameters, points=tuple(map(Schedule, points)))

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch; two with workspaces for the parts where rows are split."""
        lower = {"held": _lower_held, "looped": _lower_looped, "split": _lower_split, "strided": _lower_strided}[str(schedule["path"])]
        return lower(match, schedule, target)


Point = dict[str, int | str]


def _held(match: Match, threads: int) -> int:
    """Steps of a row per thread where ``threads`` share it."""
    return -(-match.integer("columns") // (threads * _step(match)))


def _rows(match: Match, target: Target) -> list[Point]:
    """Lanes of a warp first where rows are short, else a block; threads with four vectors first where rows fill the device."""
    step, columns = _step(match), match.integer("columns")
    threads = [t for t in _block_sizes(match, target) if t == 128 or t * step < 2 * columns]
    shared = [(t, t // WARP, WARP) for t in threads if _held(match, t) * step <= HELD_VALUES]
    short = sorted((lanes for lanes in (4, 8, 16, 32) if _held(match, lanes) * step <= HELD_VALUES), key=lambda n: abs(_held(match, n) - 4))
    alone = [(t, 1, lanes) for t in (128, 256) for lanes in short[:3]]
    held = [*alone, *shared] if columns <= WARP * step * 4 else [*shared, *alone]
    rows: list[Point] = [{"path": "held", "threads": t, "warps_per_row": w, "lanes": n} for t, w, n in dict.fromkeys(held)]
    looped: list[Point] = [{"path": "looped", "threads": t} for t in (512, 1024, 256) if t == 256 or t in threads]
    return [*rows, *looped]


def _block_sizes(match: Match, target: Target) -> tuple[int, ...]:
    """Of many rows of 16 bits, threads with four vectors each first, since a row then has the fewest registers; else 256 threads."""
    if match.integer("outer") < 8 * target.sm_count or _step(match) * 2 < 16:
        return 256, 128, 512, 1024
    return tuple(sorted((128, 256, 512, 1024), key=lambda threads: abs(_held(match, threads) - 4)))


def _split(match: Match, target: Target) -> list[Point]:
    """Parts that give every SM one or two blocks, where rows alone do not."""
    rows, columns = match.integer("outer"), match.integer("columns")
    if rows >= target.sm_count or rows > MOST_SPLIT_ROWS:
        return []
    splits = {min(-(-waves * target.sm_count // rows), columns // SHORTEST_PART) for waves in (1, 2)}
    return [{"path": "split", "threads": t, "splits": s} for t in (256, 512) for s in sorted(splits, reverse=True) if s > 1]


def _strided(match: Match) -> list[Point]:
    """Warps along the axis, as far as it is long enough for them; one alone does not add up a long axis."""
    columns = match.integer("columns")
    return [{"path": "strided", "warps": warps} for warps in (8, 4, 16, 1) if (warps == 1 and columns <= 512) or 4 * warps <= columns]


def _step(match: Match) -> int:
    return step_of(match, match.need("out").spec.dtype)


def _plan(match: Match, pdl: bool) -> dict[str, bool | int | float | str]:
    count = match.need("out").spec.numel
    return {"T": c_type(match.need("out").spec.dtype), **inputs_plan(match, count), "log": match.flag("log"), "pdl": pdl}


def _source(match: Match, template: str, plan: dict[str, bool | int | float | str], launches: tuple[Launch, ...], depth: int,
            workspaces: tuple[Workspace, ...] = ()) -> StepSource:
    return make_source(FOLDER / template, plan=plan, launches=launches, workspaces=workspaces, reduction_depth=depth,
                       epilogue=elementwise_struct(match.epilogue, len(pointwise_inputs(match))),
                       features=[Feature.GRIDDEPCONTROL] * bool(plan["pdl"]))


def _out(match: Match) -> KernelArgument:
    return pointer("out", Role.OUTPUT, match.need("out").spec.dtype, Access.WRITE)


def _resident(match: Match, target: Target, threads: int, values: int) -> int:
    """Blocks per SM that the compiler is held to where a block has one row of 16 bits: without it, it takes more registers, and
    fewer rows are on their way at a time."""
    ragged = match.integer("columns") % (values * threads) != 0
    if ragged or match.flag("log") or match.epilogue is not None or _step(match) != 8:
        return 1
    registers = max(32, values + OTHER_REGISTERS)
    return max(1, min(target.registers_per_sm // (threads * registers), target.threads_per_sm // threads))


def _lower_held(match: Match, schedule: Schedule, target: Target) -> StepSource:
    pdl = target.has(Feature.GRIDDEPCONTROL)
    threads, warps_per_row, lanes = (schedule.integer(name) for name in ("threads", "warps_per_row", "lanes"))
    rows, step, threads_per_row = match.integer("outer"), _step(match), lanes * warps_per_row
    held = _held(match, threads_per_row)
    launch = Launch(
        entry="softmax_kernel", grid=(-(-rows * threads_per_row // threads), 1, 1), block=(threads, 1, 1), pdl=pdl,
        arguments=(*inputs_arguments(match), _out(match), i64("rows", rows), i32("columns", match.integer("columns")),
                   *inputs_periods(match)))
    plan = {**_plan(match, pdl), "threads": threads, "warps_per_row": warps_per_row, "lanes": lanes, "held": held, "step": step,
            "blocks": _resident(match, target, threads, held * step) if threads == threads_per_row else 1,
            "ragged": match.integer("columns") % (held * step * threads_per_row) != 0, "columns": known_length(match.integer("columns")),
            "past_l1": are_few(pointwise_inputs(match))}
    return _source(match, "softmax.cu", plan, (launch,), held * step + threads_per_row.bit_length())


def _lower_looped(match: Match, schedule: Schedule, target: Target) -> StepSource:
    pdl = target.has(Feature.GRIDDEPCONTROL)
    threads, columns, step = schedule.integer("threads"), match.integer("columns"), _step(match)
    launch = Launch(
        entry="softmax_looped_kernel", grid=(match.integer("outer"), 1, 1), block=(threads, 1, 1), pdl=pdl,
        arguments=(*inputs_arguments(match), _out(match), i32("columns", columns), *inputs_periods(match)))
    plan = {**_plan(match, pdl), "threads": threads, "step": step}
    return _source(match, "softmax_looped.cu", plan, (launch,), _held(match, threads) * step + threads.bit_length())


def _lower_split(match: Match, schedule: Schedule, target: Target) -> StepSource:
    pdl = target.has(Feature.GRIDDEPCONTROL)
    threads, splits = schedule.integer("threads"), schedule.integer("splits")
    rows, columns, step = match.integer("outer"), match.integer("columns"), _step(match)
    part = -(-columns // (splits * step)) * step
    grid, block = (-(-columns // part), rows, 1), (threads, 1, 1)
    names = ("ws_maxima", "ws_sums")
    sizes = (i32("columns", columns), i32("part", part), *inputs_periods(match))

    def parts(access: Access) -> tuple[KernelArgument, ...]:
        return tuple(pointer(name, Role.WORKSPACE, DType.F32, access) for name in names)

    launches = (
        Launch(entry="softmax_parts_kernel", grid=grid, block=block, pdl=pdl,
               arguments=(*inputs_arguments(match), *parts(Access.WRITE), *sizes)),
        Launch(entry="softmax_write_kernel", grid=grid, block=block, pdl=pdl,
               arguments=(*inputs_arguments(match), *parts(Access.READ), _out(match), *sizes)))
    plan = {**_plan(match, pdl), "threads": threads, "step": step}
    workspaces = tuple(Workspace(name=name, nbytes=4 * rows * grid[0]) for name in names)
    return _source(match, "softmax_split.cu", plan, launches, -(-part // threads) + threads.bit_length() + grid[0], workspaces)


def _lower_strided(match: Match, schedule: Schedule, target: Target) -> StepSource:
    pdl = target.has(Feature.GRIDDEPCONTROL)
    warps, columns, inner = schedule.integer("warps"), match.integer("columns"), match.integer("inner")
    tiles = -(-inner // WARP)
    launch = Launch(
        entry="softmax_strided_kernel", grid=(match.integer("outer") * tiles, 1, 1), block=(WARP * warps, 1, 1), pdl=pdl,
        arguments=(*inputs_arguments(match), _out(match), i32("columns", columns), i64("inner", inner), i32("tiles", tiles),
                   *inputs_periods(match)))
    return _source(match, "softmax_strided.cu", {**_plan(match, pdl), "warps": warps}, (launch,), -(-columns // warps) + warps)
