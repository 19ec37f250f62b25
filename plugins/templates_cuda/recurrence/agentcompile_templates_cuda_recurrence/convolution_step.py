"""The convolution_step family: one token of a short causal convolution, its last columns in place."""

from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import c_type, make_source, operand_pointer

from agentcompile_core.plugin_api import (
    CONVOLUTION_STEP,
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

TEMPLATE = Path(__file__).with_name("convolution_step.cu")
DTYPES = (DType.F16, DType.BF16, DType.F32)
OPERANDS = ("state", "x", "weight", "bias", "out")
QUAD_BYTES = 16
WIDEST = 64  # columns that a thread keeps
THREADS = (128, 64, 256)


class ConvolutionStepFamily(TemplateFamily):
    """``convolution_step`` matches of up to 64 columns, all of one floating point type."""

    name = "convolution_step"
    version = 1

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True where all operands are of one type that is served."""
        if match.kind != CONVOLUTION_STEP:
            return Reject(f"convolution_step serves {CONVOLUTION_STEP} matches, not {match.kind}")
        types = {operand.spec.dtype for operand in match.operands}
        if len(types) > 1 or not types <= set(DTYPES):
            return Reject(f"operands are {', '.join(sorted(t.value for t in types))}; one of float16, bfloat16 and float32 is served")
        if match.integer("width") > WIDEST:
            return Reject(f"{match.integer('width')} columns; at most {WIDEST} are served")
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """Block sizes, with the state read before the dependency wait or behind it."""
        early = (True, False) if _are_quads(match) and target.has(Feature.GRIDDEPCONTROL) else (False,)
        points = tuple(Schedule({"threads": t, "early": e}) for t in THREADS for e in early)
        return ScheduleSpace(parameters=(Parameter(name="early", values=early), Parameter(name="threads", values=THREADS)), points=points)

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch, no workspace."""
        threads, channels, width = schedule.integer("threads"), match.integer("channels"), match.integer("width")
        element, pdl, quads = match.need("x").spec.dtype, target.has(Feature.GRIDDEPCONTROL), _are_quads(match)
        each = QUAD_BYTES // (width * element.bytes) if quads else 1
        plan = {"T": c_type(element), "threads": threads, "width": width, "each": each, "quads": quads, "early": bool(schedule["early"]),
                "has_bias": match.operand("bias") is not None, "silu": match.flag("silu"), "pdl": pdl}
        launch = Launch(entry="convolution_step_kernel", grid=(-(-channels // (each * threads)), 1, 1), block=(threads, 1, 1), pdl=pdl,
                        arguments=(*(operand_pointer(match, name) for name in OPERANDS), i32("channels", channels)))
        return make_source(TEMPLATE, plan=plan, launches=(launch,), features=[Feature.GRIDDEPCONTROL] * pdl, reduction_depth=width + 1)


def _are_quads(match: Match) -> bool:
    """Whether whole channels fill 16 bytes of the state, and the channels whole ones of these."""
    channel_bytes = match.integer("width") * match.need("x").spec.dtype.bytes
    return QUAD_BYTES % channel_bytes == 0 and match.integer("channels") % (QUAD_BYTES // channel_bytes) == 0
