"""Pools: the schedules of ``pool`` matches, and what they are lowered to."""

from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import c_type, elementwise_struct, make_source, operand_pointer
from agentcompile_cuda_kit.pointwise_inputs import inputs_arguments, inputs_periods, inputs_plan, inputs_reject, pointwise_inputs

from agentcompile_core.plugin_api import DType, Feature, Launch, Match, Reject, Schedule, StepSource, Target, i64

from .scan import Plan, Point

FOLDER = Path(__file__).parent
DTYPES = (DType.F16, DType.BF16, DType.F32)
OPERATIONS = ("max", "mean")
WORDS = ("extent", "made", "window", "step", "pad", "apart")
AXES = 3
LARGEST = 2**31 - 1
MOST_UNROLLED = 64  # elements of a window whose loads are written out


def pool_answer(match: Match) -> Literal[True] | Reject:
    """True for float inputs and results of any three axes that a thread can count."""
    wrong = inputs_reject(match)
    if wrong is not None:
        return wrong
    if match.text("op") not in OPERATIONS:
        return Reject(f"unknown operation {match.text('op')!r}; served are {', '.join(OPERATIONS)}")
    if match.need("out").spec.dtype not in DTYPES:
        return Reject("results are float16, bfloat16 or float32; others are not served")
    plane = [_product(match, word) for word in ("extent", "made", "window")]
    if max(plane) > LARGEST or match.need("out").spec.numel > LARGEST * 128:
        return Reject(f"planes of {plane[0]} elements, or windows of {plane[2]}: more than a 32-bit number counts")
    return True


def _product(match: Match, word: str) -> int:
    found = 1
    for axis in range(AXES):
        found *= match.integer(f"{word}{axis}")
    return found


def pool_points(match: Match, target: Target) -> list[Point]:
    """Several results per thread first where that leaves work for every SM."""
    results = match.need("out").spec.numel
    points: list[Point] = [{"path": "pool", "threads": threads, "items": items} for items in (2, 1, 4) for threads in (256, 128, 512)]
    enough = [point for point in points if results >= int(point["items"]) * int(point["threads"]) * target.sm_count]
    return [*enough, *(point for point in points if point["items"] == 1 and point not in enough)]


def lower_pool(match: Match, schedule: Schedule, target: Target) -> StepSource:
    """One launch, no workspace."""
    pdl, threads, items = target.has(Feature.GRIDDEPCONTROL), schedule.integer("threads"), schedule.integer("items")
    results, out = match.need("out").spec.numel, match.need("out")
    sizes: Plan = {f"{word}{axis}": match.integer(f"{word}{axis}") for word in WORDS for axis in range(AXES)}
    given = match.integer("outer") * _product(match, "extent")
    launch = Launch(entry="pool_kernel", grid=(-(-results // (threads * items)), 1, 1), block=(threads, 1, 1), pdl=pdl,
                    arguments=(*inputs_arguments(match), operand_pointer(match, "out"), i64("results", results), *inputs_periods(match)))
    plan: Plan = {"T": c_type(out.spec.dtype), **inputs_plan(match, given), **sizes, **_unrolled(match),
                  "largest": match.text("op") == "max", "divisor": match.integer("divisor", 0), "threads": threads, "items": items,
                  "pdl": pdl}
    return make_source(FOLDER / "pool.cu", plan=plan, launches=(launch,), features=[Feature.GRIDDEPCONTROL] * pdl,
                       epilogue=elementwise_struct(match.epilogue, len(pointwise_inputs(match))), reduction_depth=_product(match, "window"))


def _unrolled(match: Match) -> Plan:
    """From the last axis on, as long as what is written out stays short."""
    found, whole = {}, 1
    for axis in reversed(range(AXES)):
        own = match.integer(f"window{axis}")
        whole *= own
        found[f"unroll{axis}"] = own if whole <= MOST_UNROLLED else 1
    return found
