"""What the schedules of the norm family are lowered to: the kernels of each path with their plans and launches."""

from pathlib import Path

from agentcompile_cuda_kit import c_type, epilogue_struct, known_length, make_source, operand_pointer

from agentcompile_core.plugin_api import (
    Access,
    DType,
    Feature,
    KernelArgument,
    Launch,
    Match,
    Role,
    Schedule,
    StepSource,
    Target,
    Workspace,
    f32,
    i32,
    pointer,
)

from .space import WARP, is_channels, part_of, shape_of, vectors_each

FOLDER = Path(__file__).parent
NORMS = {"rms": 1, "rms_one_plus": 2, "layer": 3, "rms_once": 4, "layer_one_plus": 3}  # as ac::Norm in row.cuh
ONE_PLUS = FOLDER / "norm_one_plus.cuh"  # what tells a layer_one_plus from a layer, in plan.cuh
AUX = ("aux0", "aux1")
POINTERS = ("x", "weight", "bias", "residual", *AUX, "out", "residual_out", "x_beside", "weight_beside", "out_beside")
EARLY_WORDS = 64  # registers of weights that a thread of a cluster has beside its elements
Plan = dict[str, bool | int | float | str]


def rows_each_of(schedule: Schedule) -> int:
    """Rows of a warp that holds whole rows, or of a block."""
    return int(dict(schedule.items).get("rows_each", 1))


def early_weights(match: Match, warps_per_row: int, threads: int, target: Target) -> bool:
    """Whether weights are read before the wait for what comes before: where each SM has a block or two, and nothing else to do."""
    rows = max(match.integer("rows"), match.integer("rows_beside", 0))
    return -(-rows * WARP * warps_per_row // threads) <= 2 * target.sm_count


def lower_held(match: Match, schedule: Schedule, target: Target) -> StepSource:
    """A row in the registers of a warp or of a block."""
    threads, warps_per_row = schedule.integer("threads"), schedule.integer("warps_per_row")
    rows_each = rows_each_of(schedule)
    shape, pdl = shape_of(match), target.has(Feature.GRIDDEPCONTROL)
    vectors, beside = vectors_each(shape, WARP * warps_per_row), not shape.lone
    alike = not beside or match.integer("columns_beside") == match.integer("columns")
    launch = Launch(
        entry="norm_kernel", grid=(-(-shape.rows // (threads // WARP // warps_per_row * rows_each)), 1 + beside, 1),
        block=(threads, 1, 1), pdl=pdl,
        arguments=(*_pointers(match, POINTERS), i32("rows", match.integer("rows")), i32("columns", match.integer("columns")),
                   i32("rows_beside", match.integer("rows_beside", 0)), i32("columns_beside", match.integer("columns_beside", 0)),
                   f32("eps", match.number("norm_eps")), *_channels(match)))
    plan = {**_plan(match, threads, pdl), "warps_per_row": warps_per_row, "rows_each": rows_each, "vectors": vectors, "beside": beside,
            "has_epilogue": bool(match.epilogue), "columns": shape.columns if alike else 0,
            "early_weights": early_weights(match, warps_per_row, threads, target)}
    return _source(match, "norm.cu", plan, (launch,), vectors * shape.step + (WARP * warps_per_row).bit_length())


def lower_kept(match: Match, schedule: Schedule, target: Target) -> StepSource:
    """Rows that resident blocks walk over."""
    threads, lanes, batch, blocks = (schedule.integer(name) for name in ("threads", "lanes", "batch", "blocks"))
    shape, pdl = shape_of(match), target.has(Feature.GRIDDEPCONTROL)
    vectors = vectors_each(shape, lanes)
    grid = min(blocks * target.sm_count, -(-shape.rows // (threads // lanes * batch)))
    launch = Launch(entry="norm_kept_kernel", grid=(grid, 1, 1), block=(threads, 1, 1), pdl=pdl,
                    arguments=(*_pointers(match, ("x", "weight", "bias", "residual", "out", "residual_out")), i32("rows", shape.rows),
                               f32("eps", match.number("norm_eps"))))
    plan = {**_plan(match, threads, pdl), "lanes": lanes, "batch": batch, "blocks": blocks, "vectors": vectors, "columns": shape.columns}
    return _source(match, "norm_kept.cu", plan, (launch,), vectors * shape.step + lanes.bit_length())


def lower_split(match: Match, schedule: Schedule, target: Target) -> StepSource:
    """Rows over several blocks, in two launches with what parts add up to between them."""
    threads, splits = schedule.integer("threads"), schedule.integer("splits")
    shape, pdl = shape_of(match), target.has(Feature.GRIDDEPCONTROL)
    plan = {**_plan(match, threads, pdl), **_parts(match, threads, splits)}
    grid, block = (splits, shape.rows, 1), (threads, 1, 1)
    x, summed = match.need("x"), match.operand("residual_out")
    again = pointer("x", x.role, x.spec.dtype, Access.READ) if summed is None else \
        pointer("residual_out", summed.role, summed.spec.dtype, Access.READ)
    launches = (
        Launch(entry="norm_parts_kernel", grid=grid, block=block, pdl=pdl,
               arguments=(*_pointers(match, ("x", "residual", "residual_out")), _workspace(Access.WRITE))),
        Launch(entry="norm_write_kernel", grid=grid, block=block, pdl=pdl,
               arguments=(again, *_pointers(match, ("weight", "bias", *AUX)), _workspace(Access.READ), *_pointers(match, ("out",)),
                          f32("eps", match.number("norm_eps")), *_channels(match))))
    workspace = Workspace(name="ws_parts", nbytes=4 * shape.rows * splits * (1 + (NORMS[match.text("norm")] == NORMS["layer"])))
    depth = int(plan["vectors"]) * shape.step + threads.bit_length() + -(-splits // WARP)
    return _source(match, "norm_split.cu", plan, launches, depth, (workspace,))


def lower_cluster(match: Match, schedule: Schedule, target: Target) -> StepSource:
    """Rows over the blocks of clusters."""
    threads, splits = schedule.integer("threads"), schedule.integer("splits")
    shape, pdl = shape_of(match), target.has(Feature.GRIDDEPCONTROL)
    parts = _parts(match, threads, splits)
    launch = Launch(entry="norm_cluster_kernel", grid=(splits, shape.rows, 1), block=(threads, 1, 1), cluster=splits, pdl=pdl,
                    arguments=(*_pointers(match, ("x", "weight", "bias", "residual", *AUX, "out", "residual_out")),
                               f32("eps", match.number("norm_eps")), *_channels(match)))
    early = parts["vectors"] * (shape.weight_words + shape.step) <= EARLY_WORDS
    return _source(match, "norm_cluster.cu", {**_plan(match, threads, pdl), **parts, "early_weights": early}, (launch,),
                   parts["vectors"] * shape.step + threads.bit_length() + splits, features=(Feature.CLUSTER,))


def lower_looped(match: Match, schedule: Schedule, target: Target) -> StepSource:
    """Rows that blocks read again for each pass."""
    columns, threads, pdl = match.integer("columns"), schedule.integer("threads"), target.has(Feature.GRIDDEPCONTROL)
    plan = {**_plan(match, threads, pdl), "columns": known_length(columns)}
    launch = Launch(entry="norm_looped_kernel", grid=(match.integer("rows"), 1, 1), block=(threads, 1, 1), pdl=pdl,
                    arguments=(*_pointers(match, ("x", "weight", "bias", "out")), i32("columns", columns),
                               f32("eps", match.number("norm_eps")), *_channels(match)))
    return _source(match, "norm_looped.cu", plan, (launch,), -(-columns // threads) + threads.bit_length())


LOWER = {"held": lower_held, "kept": lower_kept, "split": lower_split, "cluster": lower_cluster, "looped": lower_looped}


def _plan(match: Match, threads: int, pdl: bool) -> Plan:
    weight = match.operand("weight") or match.operand("bias") or match.need("x")
    names = ("weight", "bias", "residual", *AUX)
    return {"T": c_type(match.need("x").spec.dtype), "W": c_type(weight.spec.dtype), "threads": threads,
            "norm": NORMS[match.text("norm")], "pdl": pdl, "channels": is_channels(match),
            **{f"has_{name}": match.operand(name) is not None for name in names}}


def _parts(match: Match, threads: int, splits: int) -> dict[str, int]:
    shape = shape_of(match)
    part = part_of(shape, splits)
    return {"splits": splits, "part": part, "vectors": -(-part // (shape.step * threads)), "columns": shape.columns}


def _source(match: Match, template: str, plan: Plan, launches: tuple[Launch, ...], depth: int, workspaces: tuple[Workspace, ...] = (),
            features: tuple[Feature, ...] = ()) -> StepSource:
    one_plus = ONE_PLUS.read_text(encoding="utf-8") if match.text("norm") == "layer_one_plus" else ""
    return make_source(FOLDER / template, plan=plan, launches=launches, workspaces=workspaces, reduction_depth=depth,
                       epilogue=one_plus + epilogue_struct(match.epilogue, 1, len(AUX)),
                       features=[*features, *[Feature.GRIDDEPCONTROL] * bool(plan["pdl"])])


def _pointers(match: Match, names: tuple[str, ...]) -> tuple[KernelArgument, ...]:
    return tuple(operand_pointer(match, name) for name in names)


def _workspace(access: Access) -> KernelArgument:
    return pointer("ws_parts", Role.WORKSPACE, DType.F32, access)


def _channels(match: Match) -> tuple[KernelArgument, KernelArgument]:
    """How many rows have weights of their own, and how many neighbours in one share a weight."""
    return i32("groups", match.integer("groups", 1)), i32("span", match.integer("span", 1))
