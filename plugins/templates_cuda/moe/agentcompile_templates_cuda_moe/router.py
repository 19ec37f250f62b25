"""The router family: which experts one token goes to, and with which weights, in one launch."""

from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import make_source, operand_pointer

from agentcompile_core.plugin_api import (
    ROUTER,
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

from .choosing import choice_facts, choice_problem, choice_types
from .space import WARP_SIZE

TEMPLATE = Path(__file__).with_name("router.cu")


class RouterFamily(TemplateFamily):
    """``router`` matches: one warp that holds all logits in its registers."""

    name = "router"
    version = 4

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True for at most 1024 experts and 32 slots, logits and weights in float16, bfloat16 or float32."""
        if match.kind != ROUTER:
            return Reject(f"router serves {ROUTER} matches, not {match.kind}")
        reason = choice_problem(match, "bias", "experts")
        return Reject(reason) if reason else True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """One point: there is too little to do for a choice."""
        return ScheduleSpace(parameters=(Parameter(name="warps", values=(1,)),), points=(Schedule({"warps": 1}),))

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch of one warp."""
        pdl = target.has(Feature.GRIDDEPCONTROL)
        facts = choice_facts(match, "bias")
        launch = Launch(entry="router_kernel", grid=(1, 1, 1), block=(WARP_SIZE, 1, 1), pdl=pdl, arguments=(
            *(operand_pointer(match, name) for name in ("logits", "bias", "scores", "experts")), i32("count", match.integer("experts")),
            i32("slots", match.integer("slots")), f32("eps", match.number("eps", 0.0)), f32("factor", match.number("factor", 1.0))))
        return make_source(TEMPLATE, plan={**choice_types(match, "bias"), **facts, "pdl": pdl}, launches=(launch,),
                           features=[Feature.GRIDDEPCONTROL] * pdl, reduction_depth=facts["held"] + 5)
