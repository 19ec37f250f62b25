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


class RopeFamily(TemplateFamily):
    """``rope`` matches: x [heads, head_dim] with its first rotary_dim elements rotated, one thread per element."""

    name = "rope"
    version = 1

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True where x, cos, sin and out share one floating point type and the rotary part is even and inside the head."""
        if match.kind != ROPE:
            return Reject(f"rope serves {ROPE} matches, not {match.kind}")
        dtypes = {operand.spec.dtype for operand in match.operands}
        if len(dtypes) != 1 or not dtypes <= set(DTYPES):
            return Reject(f"operands of types {', '.join(sorted(d.value for d in dtypes))}; one of float16, bfloat16, float32 is served")
        if match.text("style", "half") not in STYLES:
            return Reject(f"unknown style {match.text('style')!r}; served are {', '.join(STYLES)}")
        rotary_dim, head_dim = match.integer("rotary_dim"), match.integer("head_dim")
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            return Reject(f"a rotary part of {rotary_dim} in heads of {head_dim}; it must be even and inside the head")
        if match.need("cos").spec.numel != rotary_dim or match.need("sin").spec.numel != rotary_dim:
            return Reject(f"cos and sin must have {rotary_dim} elements, one position of one sequence")
        return True

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
            arguments=(operand_pointer(match, "x"), operand_pointer(match, "cos"), operand_pointer(match, "sin"),
                       operand_pointer(match, "out"), i32("heads", heads), i32("head_dim", head_dim),
                       i32("rotary_dim", match.integer("rotary_dim"))),
        )
        return make_source(
            TEMPLATE,
            plan={"T": c_type(match.need("x").spec.dtype), "threads": threads, "pdl": pdl,
                  "interleaved": match.text("style", "half") == "interleaved"},
            launches=(launch,),
            features=[Feature.GRIDDEPCONTROL] * pdl,
            reduction_depth=2,
        )
