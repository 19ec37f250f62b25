"""The router family: which experts one token goes to, and with which weights, in one launch."""

from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import c_type, make_source, operand_pointer

from agentcompile_core.plugin_api import (
    ROUTER,
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

TEMPLATE = Path(__file__).with_name("router.cu")
DTYPES = (DType.F16, DType.BF16, DType.F32)
SCORINGS = ("softmax", "sigmoid")
WARP = 32
MOST_EXPERTS, MOST_SLOTS = 32 * WARP, WARP


class RouterFamily(TemplateFamily):
    """``router`` matches: one warp that holds all logits in its registers."""

    name = "router"
    version = 3

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True for at most 1024 experts and 32 slots, logits and weights in float16, bfloat16 or float32."""
        if match.kind != ROUTER:
            return Reject(f"router serves {ROUTER} matches, not {match.kind}")
        experts, slots = match.integer("experts"), match.integer("slots")
        if experts > MOST_EXPERTS or not 1 <= slots <= min(MOST_SLOTS, experts):
            return Reject(f"{slots} of {experts} experts; router serves 1 to {MOST_SLOTS} of at most {MOST_EXPERTS}")
        if match.text("scoring", "softmax") not in SCORINGS:
            return Reject(f"unknown scoring {match.text('scoring')!r}; served are {', '.join(SCORINGS)}")
        bias = match.operand("bias")
        if bias is not None and (bias.spec.dtype not in DTYPES or bias.spec.numel != experts):
            return Reject(f"a bias of {bias.spec.numel} {bias.spec.dtype.value} for {experts} experts; one floating point number each"
                          " is served")
        for name, allowed in (("logits", DTYPES), ("scores", DTYPES), ("experts", (DType.I64,))):
            dtype = match.need(name).spec.dtype
            if dtype not in allowed:
                return Reject(f"{name} are {dtype.value}; {', '.join(each.value for each in allowed)} is served")
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """One point: there is too little to do for a choice."""
        return ScheduleSpace(parameters=(Parameter(name="warps", values=(1,)),), points=(Schedule({"warps": 1}),))

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch of one warp."""
        experts, slots = match.integer("experts"), match.integer("slots")
        pdl = target.has(Feature.GRIDDEPCONTROL)
        held = -(-experts // WARP)
        launch = Launch(entry="router_kernel", grid=(1, 1, 1), block=(WARP, 1, 1), pdl=pdl, arguments=(
            *(operand_pointer(match, name) for name in ("logits", "bias", "scores", "experts")), i32("count", experts), i32("slots", slots),
            f32("eps", match.number("eps", 0.0)), f32("factor", match.number("factor", 1.0))))
        bias = match.operand("bias")
        plan = {"Bias": c_type(bias.spec.dtype if bias is not None else DType.F32),
                "T": c_type(match.need("logits").spec.dtype), "Score": c_type(match.need("scores").spec.dtype), "held": held,
                "over_chosen": match.flag("over_chosen"), "sigmoid": match.text("scoring", "softmax") == "sigmoid",
                "biased": match.operand("bias") is not None, "floored": match.flag("floored"), "pdl": pdl}
        return make_source(TEMPLATE, plan=plan, launches=(launch,), features=[Feature.GRIDDEPCONTROL] * pdl, reduction_depth=held + 5)
