"""The strided_copy family: a part of a tensor in one piece."""

from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import c_type, make_source, operand_pointer

from agentcompile_core.plugin_api import (
    ELEMENTWISE,
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
    i64,
)

TEMPLATE = Path(__file__).with_name("strided_copy.cu")
DTYPES = (DType.F16, DType.BF16, DType.F32)
AXES = 4
MOST_ELEMENTS = 2**31 - 1


class StridedCopyFamily(TemplateFamily):
    """``elementwise`` matches whose one input is ``strided`` and that compute nothing."""

    name = "strided_copy"
    version = 1

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True for one strided input of the output's floating point type."""
        if match.kind != ELEMENTWISE or match.text("broadcast0", "full") != "strided":
            return Reject(f"strided_copy serves {ELEMENTWISE} matches with one strided input, not {match.kind}")
        if match.operand("in1") is not None or (match.epilogue is not None and match.epilogue.operations):
            return Reject("strided_copy copies one input and computes nothing")
        given, made = match.need("in0").spec, match.need("out").spec
        if given.dtype is not made.dtype or made.dtype not in DTYPES:
            return Reject(f"a copy of {given.dtype.value} to {made.dtype.value}; one of float16, bfloat16, float32 is served")
        if max(given.numel, made.numel) > MOST_ELEMENTS:
            return Reject(f"{given.numel} elements; at most {MOST_ELEMENTS} are served")
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """Three block sizes."""
        threads = (128, 256, 64)
        return ScheduleSpace(parameters=(Parameter(name="threads", values=threads),),
                             points=tuple(Schedule({"threads": t}) for t in threads))

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch, no workspace."""
        threads, count = schedule.integer("threads"), match.integer("count")
        pdl = target.has(Feature.GRIDDEPCONTROL)
        extents = [match.integer(f"extent{axis}") for axis in range(AXES)]
        strides = [match.integer(f"stride{axis}") for axis in range(AXES)]
        launch = Launch(
            entry="strided_copy_kernel", grid=(-(-count // threads), 1, 1), block=(threads, 1, 1), pdl=pdl,
            arguments=(operand_pointer(match, "in0"), operand_pointer(match, "out"), i64("count", count),
                       i64("offset", match.integer("offset")), *(i32(f"extent{axis}", extents[axis]) for axis in range(1, AXES)),
                       *(i64(f"stride{axis}", strides[axis]) for axis in range(AXES))),
        )
        plan = {"A": c_type(match.need("in0").spec.dtype), "T": c_type(match.need("out").spec.dtype), "threads": threads, "pdl": pdl}
        return make_source(TEMPLATE, plan=plan, launches=(launch,), features=[Feature.GRIDDEPCONTROL] * pdl)
