"""The experts family: linear layers of the experts chosen for one token, as weight streams of their matrices alone."""

from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import c_type, epilogue_struct, make_source, operand_pointer

from agentcompile_core.plugin_api import (
    EXPERT_LINEAR,
    ContractError,
    DType,
    Feature,
    Launch,
    Match,
    Parameter,
    Reject,
    Schedule,
    ScheduleSpace,
    StepSource,
    Target,
    TemplateFamily,
    i32,
)

from .space import GRID_LIMIT, MOST_SLOTS, WARP_SIZE, Shape, grid_of, schedules, shape_of, shared_bytes, tile_of

TEMPLATE = Path(__file__).with_name("experts.cu")
DTYPES = (DType.F16, DType.BF16, DType.F32)
PARAMETERS = ("warps", "rows", "unroll", "turns")
POINTERS = ("x", "weight", "experts", "bias", "scale", "aux0", "aux1", "out")


class ExpertsFamily(TemplateFamily):
    """``expert_linear`` matches: gate and up with their activation, or down with the weighted sum over the slots."""

    name = "experts"
    version = 1

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True for matrices [experts, rows, k] in float16, bfloat16 or float32 and at most 32 slots."""
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
        """At most 96 schedules."""
        points = schedules(shape_of(match), target)
        parameters = tuple(Parameter(name=name, values=tuple(sorted({point[name] for point in points}))) for name in PARAMETERS)
        return ScheduleSpace(parameters=parameters, points=points)

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch, no workspace."""
        shape = shape_of(match)
        threads = schedule.integer("warps") * WARP_SIZE
        pdl = target.has(Feature.GRIDDEPCONTROL)
        sizes = (i32("n", shape.n), i32("k", shape.k), i32("slots", shape.slots))
        launch = Launch(entry="experts_kernel", grid=grid_of(shape, schedule), block=(threads, 1, 1), pdl=pdl,
                        shared_bytes=shared_bytes(shape, schedule),
                        arguments=(*(operand_pointer(match, name) for name in POINTERS), *sizes))
        plan = {"pdl": pdl, "threads": threads, **{name: schedule.integer(name) for name in ("warps", "rows", "unroll")},
                "tile": tile_of(shape, schedule), **_types(match), **_facts(match, shape)}
        return make_source(TEMPLATE, plan=plan, launches=(launch,), features=[Feature.GRIDDEPCONTROL] * pdl,
                           epilogue=epilogue_struct(match.epilogue, shape.pair, _aux_count(match)),
                           reduction_depth=-(-shape.k // WARP_SIZE) + 5 + shape.slots_of_block)


def _types(match: Match) -> dict[str, str]:
    scale = match.operand("scale")
    element = match.need("weight").spec.dtype
    return {"T": c_type(element), "Out": c_type(match.need("out").spec.dtype), "Scale": c_type(scale.spec.dtype if scale else element)}


def _facts(match: Match, shape: Shape) -> dict[str, bool | int]:
    return {"pair": shape.pair, "vectors": shape.vectorized, **{name: match.flag(name) for name in ("interleaved", "shared", "summed")},
            **{f"has_{name}": match.operand(name) is not None for name in ("bias", "aux0", "aux1")}}


def _aux_count(match: Match) -> int:
    return max((index + 1 for index in (0, 1) if match.operand(f"aux{index}") is not None), default=0)


def _problem(match: Match) -> str:
    element = match.need("weight").spec.dtype
    allowed = ", ".join(dtype.value for dtype in DTYPES)
    if element not in DTYPES or match.need("out").spec.dtype not in DTYPES:
        return f"weights are {element.value} and the result {match.need('out').spec.dtype.value}; experts serves {allowed}"
    if match.flag("transposed"):
        return "the matrices lie column by column; experts reads rows"
    n, k, slots, pair = (match.integer(name) for name in ("n", "k", "slots", "pair"))
    if not 1 <= slots <= MOST_SLOTS:
        return f"{slots} experts are chosen; experts serves 1 to {MOST_SLOTS}"
    if pair not in (1, 2) or (pair == 2 and match.flag("summed")):
        return f"pair is {pair}; experts combines at most two rows, and none of those that it sums over slots"
    if min(n, k) < 1 or max(n * pair, k) > GRID_LIMIT:
        return f"n={n}, k={k}: both must be positive 32-bit integers"
    if match.flag("summed") != (match.operand("scale") is not None):
        return "what is summed needs an operand scale, and nothing else may have one"
    return _operand_problem(match, element)


def _operand_problem(match: Match, element: DType) -> str:
    for operand in match.operands:
        if operand.spec.strides:
            return f"operand {operand.name} is not contiguous"
        dtypes = {"out": DTYPES, "experts": (DType.I64,), "scale": (element, DType.F32)}.get(operand.name, (element,))
        if operand.spec.dtype not in dtypes:
            return f"operand {operand.name} is {operand.spec.dtype.value}; {', '.join(dtype.value for dtype in dtypes)} is served"
    return ""
