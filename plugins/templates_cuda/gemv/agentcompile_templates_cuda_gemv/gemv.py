"""The gemv family: linear layers of one token, with norm prologue and pointwise epilogue, as weight streams."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import block_needs, c_type, epilogue_struct, make_source, operand_pointer

from agentcompile_core.plugin_api import (
    LINEAR,
    Access,
    ContractError,
    DType,
    Feature,
    KernelArgument,
    Launch,
    Match,
    Needs,
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
    null,
    pointer,
)

from . import direct_space, ring_space
from .direct_space import direct_schedules, direct_shared_bytes, promised_blocks
from .ring_space import STATIC_GROUPS, ring_schedules, ring_shared_bytes, room_by_registers, static_groups
from .shape import WARP_SIZE, Shape, ceil_div, shape_of

FOLDER = Path(__file__).parent
MOST_DIRECT_POINTS = 80
MOST_HELD_VECTORS = 4  # 16-byte vectors of x that a thread keeps in registers while it is normalized
MOST_COPIED_VECTORS = 8  # as they are, that a thread has on their way at a time
TEMPLATES = {"direct": "gemv.cu", "ring": "gemv_ring.cu", "tensor": "gemv_tensor.cu"}  # by path
NORMS = {"none": 0, "rms": 1, "rms_one_plus": 2, "layer": 3, "rms_once": 4}  # as ac::Norm in row.cuh
POST_NORMS = ("rms", "rms_one_plus", "rms_once")
DTYPES = (DType.F16, DType.BF16, DType.F32)
TICKETS = "tickets"  # the counter by which rows are dealt
PARAMETER_NAMES = ("path", "warps", "rows", "columns", "stages", "in_flight", "unroll", "warps_per_row", "blocks_per_sm",
                   "specialize_k")


class GemvFamily(TemplateFamily):
    """Generated matrix-vector kernels for ``linear`` matches of one token.

    Three templates: ``gemv.cu`` (``path=direct``, weights through registers, every architecture), ``gemv_ring.cu`` (``path=ring``, weights
    through bulk copies, sm_90 and later) and ``gemv_tensor.cu`` (``path=tensor``, the same by tensor cores, fp16 and bf16). Operands and
    argument order: see the kernels.
    """

    name = "gemv"
    version = 5

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True for one-token linear matches in fp16, bf16 or fp32 whose input row fits into shared memory; what is added may be of any of
        these types, and the input of the weights' or float32."""
        if match.kind != LINEAR:
            return Reject(f"gemv serves {LINEAR} matches, not {match.kind}")
        reason = _operand_problem(match) or _attribute_problem(match)
        if reason:
            return Reject(reason)
        if not direct_schedules(shape_of(match), target):
            return Reject(f"a row of {match.integer('k')} elements does not fit into the shared memory of {target.name}")
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """At most 200 schedules; two ring schedules for each direct one where the ring is possible."""
        shape = shape_of(match)
        rings = iter(ring_schedules(shape, target))
        points: list[Schedule] = []
        for pair in zip_longest(zip_longest(rings, rings), direct_schedules(shape, target)[:MOST_DIRECT_POINTS]):
            points.extend(schedule for schedule in (*(pair[0] or ()), pair[1]) if schedule is not None)
        parameters = [Parameter(name=name, values=tuple(sorted({point[name] for point in points}))) for name in PARAMETER_NAMES]
        dealt = tuple(sorted({static_groups(point) for point in points} - {0}))
        parameters += [Parameter(name=STATIC_GROUPS, values=dealt)] * bool(dealt)
        ruled_out = direct_space.ruled_out(shape, target) + ring_space.ruled_out(shape, target)
        return ScheduleSpace(parameters=tuple(parameters), points=tuple(points), ruled_out=tuple(sorted(ruled_out.items())))

    def needs(self, match: Match, schedule: Schedule, target: Target) -> Needs:
        """Of the direct path registers and shared memory, of the ring shared memory."""
        shape, threads = shape_of(match), schedule.integer("warps") * WARP_SIZE
        if schedule["path"] in ring_space.PATHS:
            shared_bytes = ring_shared_bytes(shape, schedule) + ring_space.static_shared_bytes(shape, schedule)
            return block_needs(target, threads=threads + WARP_SIZE, shared_bytes=shared_bytes)
        return block_needs(target, threads=threads, registers=direct_space.registers(shape, schedule),
                           shared_bytes=direct_shared_bytes(shape, schedule) + direct_space.STATIC_SHARED_BYTES)

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """The kernel of one schedule; one launch, and a counter of tickets where rows are dealt."""
        shape = shape_of(match)
        ring = schedule["path"] in ring_space.PATHS
        normed = match.text("norm", "none") != "none" or match.operand("residual") is not None
        plan = _ring_plan(shape, schedule, target, normed) if ring else _direct_plan(shape, schedule, target)
        element = match.need("weight").spec.dtype
        pdl = target.has(Feature.GRIDDEPCONTROL)
        constants = {
            "pdl": pdl, **plan, "pair": shape.pair, "norm": NORMS[match.text("norm", "none")],
            "k": shape.k if schedule["specialize_k"] else 0,
            **{f"has_{name}": match.operand(name) is not None for name in ("norm_out", "residual", "aux0", "aux1")},
            "post_norm": NORMS[match.text("post_norm", "none")],
        }
        groups = schedule.integer("warps") // schedule.integer("warps_per_row")
        blocks = shape.blocks(target, schedule.integer("blocks_per_sm"), groups)
        launch = Launch(
            entry="gemv_kernel",
            grid=(blocks, 1, 1),
            block=(int(plan["threads"]), 1, 1),
            shared_bytes=ring_shared_bytes(shape, schedule) if ring else direct_shared_bytes(shape, schedule),
            pdl=pdl,
            arguments=_arguments(match, shape, _tickets(schedule) if ring else (), blocks),
        )
        features = [Feature.GRIDDEPCONTROL] * pdl + [Feature.BULK_COPY, Feature.MBARRIER] * ring
        return make_source(
            FOLDER / TEMPLATES[str(schedule["path"])],
            plan={"T": c_type(element), **_types(match), "Out": c_type(match.need("out").spec.dtype), **constants},
            launches=(launch,),
            epilogue=epilogue_struct(match.epilogue, shape.pair, _aux_count(match)),
            features=features,
            workspaces=(Workspace(name=TICKETS, nbytes=4, zeroed=True),) if static_groups(schedule) else (),
            reduction_depth=ceil_div(shape.k, WARP_SIZE * schedule.integer("warps_per_row")) + 5
            + schedule.integer("warps_per_row").bit_length(),
        )


def _types(match: Match) -> dict[str, str]:
    """Of operands that need not have the type of the weights."""
    element = match.need("weight").spec.dtype
    given = {"X": "x", "A0": "aux0", "A1": "aux1"}
    return {name: c_type(operand.spec.dtype if (operand := match.operand(of)) is not None else element) for name, of in given.items()}


def _ring_plan(shape: Shape, schedule: Schedule, target: Target, normed: bool) -> dict[str, bool | int | float]:
    consumers = schedule.integer("warps") * WARP_SIZE
    columns = schedule.integer("columns")
    return {
        "threads": consumers + WARP_SIZE,
        **{name: schedule.integer(name) for name in ("warps", "blocks_per_sm", "rows", "columns", "stages", "in_flight")},
        "full_stages": shape.k % columns == 0,
        "static_groups": static_groups(schedule),
        "resident": room_by_registers(shape, schedule, target),
        "held_vectors": _held_vectors(shape, consumers) if normed else _copied_vectors(shape, consumers),
    }


def _direct_plan(shape: Shape, schedule: Schedule, target: Target) -> dict[str, bool | int | float]:
    threads = schedule.integer("warps") * WARP_SIZE
    return {
        "threads": threads,
        **{name: schedule.integer(name) for name in ("warps", "rows", "unroll", "warps_per_row")},
        "blocks_per_sm": promised_blocks(shape, schedule, target),
        "vectors": shape.vectorized,
        "held_vectors": _held_vectors(shape, threads),
    }


def _held_vectors(shape: Shape, threads: int) -> int:
    return min(MOST_HELD_VECTORS, ceil_div(ceil_div(shape.k, shape.vector), threads))


def _copied_vectors(shape: Shape, threads: int) -> int:
    """As evenly as can be over the fewest turns."""
    each = ceil_div(ceil_div(shape.k, shape.vector), threads)
    return ceil_div(each, ceil_div(each, MOST_COPIED_VECTORS))


def _aux_count(match: Match) -> int:
    return max((index + 1 for index in (0, 1) if match.operand(f"aux{index}") is not None), default=0)


def _tickets(schedule: Schedule) -> tuple[KernelArgument, ...]:
    return (pointer(TICKETS, Role.WORKSPACE, DType.I32, Access.READ_WRITE) if static_groups(schedule) else null(TICKETS),)


def _arguments(match: Match, shape: Shape, tickets: tuple[KernelArgument, ...], blocks: int) -> tuple[KernelArgument, ...]:
    operands = [operand_pointer(match, name) for name in ("x", "weight", "norm_weight", "norm_bias", "aux0", "aux1")]
    around = [operand_pointer(match, name) for name in ("out", "norm_out", "residual", "post_weight", "residual_out")]
    return (*operands, *around, *tickets, i32("n", shape.n), i32("rows_each", shape.n // blocks), i32("k", shape.k),
            f32("norm_eps", match.number("norm_eps", 0.0)), f32("post_eps", match.number("post_eps", 0.0)))


def _operand_problem(match: Match) -> str:
    for name in ("x", "weight", "out"):
        if match.operand(name) is None:
            return f"the match has no operand {name!r}"
    element = match.need("weight").spec.dtype
    if element not in DTYPES:
        return f"weights are {element.value}; gemv serves {', '.join(dtype.value for dtype in DTYPES)}"
    for operand in match.operands:
        if operand.spec.strides:
            return f"operand {operand.name} is not contiguous"
        served = DTYPES if operand.name in ("out", "aux0", "aux1") else (element, DType.F32) if operand.name == "x" else (element,)
        if operand.spec.dtype not in served:
            return f"operand {operand.name} is {operand.spec.dtype.value} beside weights in {element.value}"
    return ""


def _attribute_problem(match: Match) -> str:
    n, k, pair = match.integer("n"), match.integer("k"), match.integer("pair", 1)
    norm = match.text("norm", "none")
    if pair not in (1, 2):
        return f"pair is {pair}; gemv combines at most two rows"
    if norm not in NORMS:
        return f"norm {norm!r} is unknown; gemv knows {', '.join(NORMS)}"
    if norm == "rms_one_plus" and match.operand("norm_weight") is None:
        return f"norm {norm!r} needs an operand norm_weight"
    reason = _residual_problem(match)
    if reason:
        return reason
    if norm == "none" and match.operand("norm_out") is not None:
        return "norm_out is written where there is a norm"
    if min(n, k) < 1 or max(n * pair, k) >= 1 << 31:
        return f"n={n}, k={k}: both must be positive 32-bit integers"
    if match.need("x").spec.numel != k:
        return f"x has {match.need('x').spec.numel} elements for rows of {k}: gemv serves one token"
    if match.need("weight").spec.numel != pair * n * k:
        return f"weight has {match.need('weight').spec.numel} elements, expected {pair} x {n} x {k}"
    try:
        epilogue_struct(match.epilogue, pair, _aux_count(match))
    except ContractError as error:
        return f"epilogue: {error}"
    return ""


def _residual_problem(match: Match) -> str:
    kind, residual = match.text("post_norm", "none"), match.operand("residual")
    if (kind == "none") != (residual is None):
        return "a residual is added to a normed row, which a match without one has not"
    if residual is None:
        return "residual_out is written where there is a residual" if match.operand("residual_out") is not None else ""
    if kind not in POST_NORMS:
        return f"norm {kind!r} before a residual; gemv knows {', '.join(POST_NORMS)}"
    if kind == "rms_one_plus" and match.operand("post_weight") is None:
        return f"norm {kind!r} needs an operand post_weight"
    if match.need("x").spec.dtype is not match.need("weight").spec.dtype:
        return "a row with a residual has the type of the weights"
    return ""
