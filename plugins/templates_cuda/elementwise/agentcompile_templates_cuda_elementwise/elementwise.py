"""The elementwise family: a pointwise expression over up to six inputs."""

from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import c_type, elementwise_struct, known_length, make_source, operand_pointer
from agentcompile_cuda_kit.pointwise_inputs import are_few

from agentcompile_core.plugin_api import (
    ELEMENTWISE,
    Access,
    DType,
    Feature,
    Launch,
    Match,
    Operand,
    Parameter,
    Reject,
    Role,
    Schedule,
    ScheduleSpace,
    StepSource,
    Target,
    TemplateFamily,
    i32,
    i64,
    pointer,
)

from .strided_copy import copy_source, is_strided, refusal

TEMPLATE = Path(__file__).with_name("elementwise.cu")
DTYPES = (DType.F16, DType.BF16, DType.F32)
BROADCASTS = {"full": 0, "row": 1, "scalar": 2, "channel": 4, "middle": 5}  # as in elementwise.cu
ABSENT = 3
MOST_INPUTS = 6
LARGEST = 2**31 - 1
THREADS = (128, 256, 64)
FILLS = 2  # blocks for every SM


class ElementwiseFamily(TemplateFamily):
    """``elementwise`` matches: out[i] = epilogue(in0[i], in1[i], ...), each input full, one row, a scalar, one element
    per channel, or repeated along a middle axis; and copies of parts."""

    name = "elementwise"
    version = 4

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True for one to six floating point inputs of any mix of types."""
        if match.kind != ELEMENTWISE:
            return Reject(f"elementwise serves {ELEMENTWISE} matches, not {match.kind}")
        inputs = _inputs(match)
        if not 1 <= len(inputs) <= MOST_INPUTS or len(inputs) + 1 != len(match.operands):
            return Reject(f"{len(match.operands) - 1} inputs; in0 to in{MOST_INPUTS - 1} are served")
        for operand in match.operands:
            if operand.spec.dtype not in DTYPES:
                return Reject(f"operand {operand.name} is {operand.spec.dtype.value}; float16, bfloat16 and float32 are served")
        if is_strided(match):
            why_not = refusal(match)
            return Reject(why_not) if why_not else True
        kinds = [match.text(f"broadcast{j}", "full") for j in range(len(inputs))]
        if not set(kinds) <= set(BROADCASTS):
            return Reject(f"broadcasts {', '.join(kinds)}; served are {', '.join(BROADCASTS)}")
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """At most 12 points: block size, and elements per thread: a 16-byte vector, less of one, or a single element.

        Whole vectors come first where they make blocks for every SM twice, the smaller ones where they do not: of 151,936 halves
        two and four a thread were the fastest, eight the slowest of all (docs/performance.md).
        """
        vector = 1 if is_strided(match) else 16 // match.need("out").spec.dtype.bytes
        steps = [vector >> halvings for halvings in range(vector.bit_length())]
        if match.integer("count") < FILLS * target.sm_count * vector * THREADS[0]:
            steps = [*steps[1:-1], steps[0], *steps[-1:]] if len(steps) > 1 else steps
        values = {"step": tuple(steps), "threads": THREADS}
        points = tuple(Schedule({"step": s, "threads": t}) for s in values["step"] for t in values["threads"])
        return ScheduleSpace(parameters=tuple(Parameter(name=k, values=v) for k, v in sorted(values.items())), points=points)

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch, no workspace."""
        if is_strided(match):
            return copy_source(match, schedule.integer("threads"), target)
        threads, step, count = schedule.integer("threads"), schedule.integer("step"), match.integer("count")
        inputs, out = _inputs(match), match.need("out")
        pdl = target.has(Feature.GRIDDEPCONTROL)
        types = {f"A{j}": c_type((inputs[j] if j < len(inputs) else out).spec.dtype) for j in range(MOST_INPUTS)}
        broadcasts = {f"broadcast_{j}": BROADCASTS[match.text(f"broadcast{j}", "full")] if j < len(inputs) else ABSENT
                      for j in range(MOST_INPUTS)}
        blocks, rest = divmod(count, threads * step)
        grid = blocks + (rest > 0)
        plan = {"T": c_type(out.spec.dtype), **types, "Index": c_type(DType.I32 if grid * threads * step <= LARGEST else DType.I64),
                "threads": threads, "step": step, "pdl": pdl, **broadcasts, "even": rest == 0, "past_l1": are_few(inputs),
                "columns": known_length(match.integer("columns", count)) if BROADCASTS["row"] in broadcasts.values() else 0}
        launch = Launch(
            entry="elementwise_kernel", grid=(grid, 1, 1), block=(threads, 1, 1), pdl=pdl,
            arguments=(*(operand_pointer(match, f"in{j}") for j in range(MOST_INPUTS)),
                       pointer("out", Role.OUTPUT, out.spec.dtype, Access.WRITE), i64("count", count),
                       i32("columns", match.integer("columns", count)), i64("inner", match.integer("inner", 1)),
                       *(i64(f"extent{j}", _extent(match, inputs[j], j) if j < len(inputs) else 1) for j in range(MOST_INPUTS))),
        )
        return make_source(
            TEMPLATE,
            plan=plan,
            launches=(launch,),
            epilogue=elementwise_struct(match.epilogue, len(inputs)),
            features=[Feature.GRIDDEPCONTROL] * pdl,
            reduction_depth=max(1, len(match.epilogue.operations) if match.epilogue else 1),
        )


def _extent(match: Match, operand: Operand, j: int) -> int:
    """Channels; of what repeats along a middle axis, how many neighbours of the result share ``inner`` of its elements."""
    if match.text(f"broadcast{j}", "full") == "middle":
        return match.integer("inner") * match.integer("count") // operand.spec.numel
    return operand.spec.numel


def _inputs(match: Match) -> tuple[Operand, ...]:
    found = [match.operand(f"in{j}") for j in range(MOST_INPUTS)]
    present = tuple(operand for operand in found if operand is not None)
    return present if found[: len(present)] == list(present) else ()
