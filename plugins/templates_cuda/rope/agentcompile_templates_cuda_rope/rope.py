"""The rope family: rotary position embedding of the heads of one token."""

from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import c_type, make_source, operand_pointer

from agentcompile_core.plugin_api import (
    ROPE,
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

TEMPLATE = Path(__file__).with_name("rope.cu")
DTYPES = (DType.F16, DType.BF16, DType.F32)
STYLES = ("half", "interleaved")
PLACES = ("rotary_dim", "first", "x_first", "x_step", "rest_first", "rest_step")


class RopeFamily(TemplateFamily):
    """``rope`` matches: heads put together of rotated channels and others, one thread per element."""

    name = "rope"
    version = 2

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True where x, rest and out are of one type or out is float32, the tables too, and the rotary part is even and in the head."""
        if match.kind != ROPE:
            return Reject(f"rope serves {ROPE} matches, not {match.kind}")
        if match.text("style", "half") not in STYLES:
            return Reject(f"unknown style {match.text('style')!r}; served are {', '.join(STYLES)}")
        reason = _type_problem(match) or _size_problem(match)
        return Reject(reason) if reason else True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """Three block sizes."""
        threads = (128, 256, 64)
        return ScheduleSpace(parameters=(Parameter(name="threads", values=threads),),
                             points=tuple(Schedule({"threads": t}) for t in threads))

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch, no workspace."""
        threads = schedule.integer("threads")
        heads, head_dim = match.integer("heads"), match.integer("head_dim")
        pdl = target.has(Feature.GRIDDEPCONTROL)
        launch = Launch(
            entry="rope_kernel", grid=(-(-heads * head_dim // threads), 1, 1), block=(threads, 1, 1), pdl=pdl,
            arguments=(
                *(operand_pointer(match, name) for name in ("x", "rest", "cos", "sin", "out")), i32("heads", heads),
                i32("head_dim", head_dim), *(i32(name, place_of(match, name)) for name in PLACES),
            ),
        )
        return make_source(
            TEMPLATE,
            plan={"T": c_type(match.need("x").spec.dtype), "Table": c_type(match.need("cos").spec.dtype),
                  "Out": c_type(match.need("out").spec.dtype), "threads": threads, "pdl": pdl,
                  "interleaved": match.text("style", "half") == "interleaved", "apart": match.flag("apart"),
                  "has_rest": match.operand("rest") is not None},
            launches=(launch,),
            features=[Feature.GRIDDEPCONTROL] * pdl,
            reduction_depth=2,
        )


def place_of(match: Match, name: str) -> int:
    """One of PLACES; where a match does not say it, x holds whole heads side by side, whose first channels are rotated."""
    whole = {"rest_first": "rotary_dim", "x_step": "head_dim", "rest_step": "head_dim"}
    return match.integer(name, match.integer(whole[name]) if name in whole else 0)


def _type_problem(match: Match) -> str:
    row, table, out = (match.need(name).spec.dtype for name in ("x", "cos", "out"))
    rest, sine = match.operand("rest"), match.need("sin").spec.dtype
    alike = table is sine and table in (row, DType.F32) and out in (row, DType.F32) and (rest is None or rest.spec.dtype is row)
    if alike and row in DTYPES:
        return ""
    dtypes = {operand.spec.dtype for operand in match.operands}
    return (f"operands of types {', '.join(sorted(d.value for d in dtypes))}; one of float16, bfloat16, float32 is served,"
            " tables and result also in float32")


def _size_problem(match: Match) -> str:
    rotary_dim, head_dim, heads = (match.integer(name) for name in ("rotary_dim", "head_dim", "heads"))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        return f"a rotary part of {rotary_dim} in heads of {head_dim}; it must be even and inside the head"
    if match.need("cos").spec.numel != rotary_dim or match.need("sin").spec.numel != rotary_dim:
        return f"cos and sin must have {rotary_dim} elements, one position of one sequence"
    rest, width = match.operand("rest") or match.need("x"), head_dim - rotary_dim
    for name, operand, length in (("x", match.need("x"), rotary_dim), ("rest", rest, width)):
        first, step = place_of(match, f"{name}_first"), place_of(match, f"{name}_step")
        if length and not 0 <= first <= first + (heads - 1) * step + length <= operand.spec.numel:
            return f"{heads} heads of {length} from element {first} on, {step} apart, in {operand.spec.numel} of {name}"
    return "" if 0 <= place_of(match, "first") <= width else f"the rotary part begins at {match.integer('first')} of {head_dim}"
