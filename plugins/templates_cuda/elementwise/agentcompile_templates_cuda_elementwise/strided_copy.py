"""The elementwise family where its one input is a part that lies apart in a tensor: a copy in one piece."""

from pathlib import Path

from agentcompile_cuda_kit import c_type, make_source, operand_pointer

from agentcompile_core.plugin_api import DType, Feature, Launch, Match, StepSource, Target, i32, i64

TEMPLATE = Path(__file__).with_name("strided_copy.cu")
DTYPES = (DType.F16, DType.BF16, DType.F32)
AXES = 4
MOST_ELEMENTS = 2**31 - 1


def refusal(match: Match) -> str:
    """Why a match of a strided input is not served; empty where it is: one input of the output's type that is copied as it is."""
    if match.operand("in1") is not None or (match.epilogue is not None and match.epilogue.operations):
        return "a strided input is copied alone, and nothing is computed with it"
    given, made = match.need("in0").spec, match.need("out").spec
    if given.dtype is not made.dtype or made.dtype not in DTYPES:
        return f"a strided copy of {given.dtype.value} to {made.dtype.value}; one of float16, bfloat16, float32 is served"
    if max(given.numel, made.numel) > MOST_ELEMENTS:
        return f"{given.numel} elements of a strided input; at most {MOST_ELEMENTS} are served"
    return ""


def is_strided(match: Match) -> bool:
    """Whether the match reads a part that lies apart."""
    return match.text("broadcast0", "full") == "strided"


def copy_source(match: Match, threads: int, target: Target) -> StepSource:
    """One launch of ``threads`` per block, no workspace."""
    count, pdl = match.integer("count"), target.has(Feature.GRIDDEPCONTROL)
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
