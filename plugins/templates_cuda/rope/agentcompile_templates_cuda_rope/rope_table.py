"""The rope_table family: cos and sin of one position, once per decode step."""

from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import c_type, make_source, operand_pointer

from agentcompile_core.plugin_api import (
    ROPE_TABLE,
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
    f32,
    i32,
)

TEMPLATE = Path(__file__).with_name("rope_table.cu")
DTYPES = (DType.F16, DType.BF16, DType.F32)
STYLES = ("half", "interleaved")


class RopeTableFamily(TemplateFamily):
    """``rope_table`` matches: cos, sin [2 * half] of position * inv_freq [half], each frequency standing twice."""

    name = "rope_table"
    version = 2

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True for an int64 position, fp32 frequencies and cos and sin of one floating point type and 2 * half elements."""
        if match.kind != ROPE_TABLE:
            return Reject(f"rope_table serves {ROPE_TABLE} matches, not {match.kind}")
        if match.need("position").spec.dtype is not DType.I64 or match.need("inv_freq").spec.dtype is not DType.F32:
            return Reject("rope_table needs an int64 position and float32 frequencies")
        cos, sin = match.need("cos").spec, match.need("sin").spec
        if cos.dtype is not sin.dtype or cos.dtype not in DTYPES:
            return Reject(f"tables of types {cos.dtype.value} and {sin.dtype.value}; one of float16, bfloat16, float32 is served")
        if match.text("style", "half") not in STYLES:
            return Reject(f"unknown style {match.text('style')!r}; served are {', '.join(STYLES)}")
        half = match.integer("half")
        if (cos.numel, sin.numel, match.need("inv_freq").spec.numel) != (2 * half, 2 * half, half):
            return Reject(f"cos and sin must have {2 * half} elements and inv_freq {half}: one position of one sequence")
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """Two block sizes."""
        threads = (64, 128)
        return ScheduleSpace(parameters=(Parameter(name="threads", values=threads),),
                             points=tuple(Schedule({"threads": t}) for t in threads))

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch, no workspace."""
        threads, half = schedule.integer("threads"), match.integer("half")
        pdl = target.has(Feature.GRIDDEPCONTROL)
        launch = Launch(
            entry="rope_table_kernel", grid=(-(-half // threads), 1, 1), block=(threads, 1, 1), pdl=pdl,
            arguments=(operand_pointer(match, "position"), operand_pointer(match, "inv_freq"), operand_pointer(match, "cos"),
                       operand_pointer(match, "sin"), i32("half", half),
                       f32("attention_scaling", match.number("attention_scaling", 1.0))),
        )
        plan = {"T": c_type(match.need("cos").spec.dtype), "threads": threads, "pdl": pdl,
                "interleaved": match.text("style", "half") == "interleaved"}
        return make_source(TEMPLATE, plan=plan, launches=(launch,), features=[Feature.GRIDDEPCONTROL] * pdl)
