"""The argmax family: the greedy token, and with it the decode state, on the device."""

from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import c_type, make_source, operand_pointer

from agentcompile_core.plugin_api import (
    ARGMAX,
    Access,
    DType,
    Feature,
    Launch,
    Match,
    Parameter,
    Reject,
    Role,
    Schedule,
    ScheduleSpace,
    StepSource,
    Target,
    TemplateFamily,
    Workspace,
    i32,
    null,
    pointer,
)

TEMPLATE = Path(__file__).with_name("argmax.cu")
DTYPES = (DType.F16, DType.BF16, DType.F32)
STATES = ("ids", "position", "history")


class ArgmaxFamily(TemplateFamily):
    """First index of the maximum of [n] logits, NaN counting as the maximum; optionally advances the decode state."""

    name = "argmax"
    version = 1

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True for floating point logits; with ``advance`` the match must name ids, position and history (int64)."""
        if match.kind != ARGMAX:
            return Reject(f"argmax serves {ARGMAX} matches, not {match.kind}")
        logits, token = match.need("logits").spec, match.need("token").spec
        if logits.dtype not in DTYPES or token.dtype is not DType.I64:
            return Reject(f"{logits.dtype.value} logits and {token.dtype.value} token; float logits and an int64 token are served")
        if match.flag("advance"):
            for name in STATES:
                operand = match.operand(name)
                if operand is None or operand.spec.dtype is not DType.I64:
                    return Reject(f"the decode state has no int64 {name}")
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """At most 18 points: about one or two 16-byte vectors per thread first."""
        n = match.integer("n")
        vector = 16 // match.need("logits").spec.dtype.bytes
        blocks = sorted({max(1, min(target.sm_count // part, -(-n // (vector * 256)))) for part in (1, 2, 4)}, reverse=True)
        values = {"threads": (256, 512, 1024), "blocks": tuple(blocks), "unroll": (2, 1)}
        points = tuple(Schedule({"threads": t, "blocks": b, "unroll": u})
                       for t in values["threads"] for b in values["blocks"] for u in values["unroll"])
        return ScheduleSpace(parameters=tuple(Parameter(name=k, values=v) for k, v in sorted(values.items())), points=points)

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch; workspaces for the blocks' results and the arrival counter."""
        advance, blocks = match.flag("advance"), schedule.integer("blocks")
        logits = match.need("logits")
        pdl = target.has(Feature.GRIDDEPCONTROL)
        arguments = (
            pointer("logits", logits.role, logits.spec.dtype),
            pointer("token", Role.OUTPUT, DType.I64, Access.WRITE),
            i32("n", match.integer("n")),
            pointer("ws_values", Role.WORKSPACE, DType.F32, Access.READ_WRITE),
            pointer("ws_indices", Role.WORKSPACE, DType.I32, Access.READ_WRITE),
            pointer("counter", Role.WORKSPACE, DType.I32, Access.READ_WRITE),
            *(operand_pointer(match, name) if advance else null(name) for name in STATES),
            i32("history_length", match.need("history").spec.numel if advance else 0),
        )
        launch = Launch(entry="argmax_kernel", grid=(blocks, 1, 1), block=(schedule.integer("threads"), 1, 1), pdl=pdl,
                        arguments=arguments)
        return make_source(
            TEMPLATE,
            plan={"T": c_type(logits.spec.dtype), "threads": schedule.integer("threads"), "unroll": schedule.integer("unroll"), "pdl": pdl,
                       "advance": advance},
            launches=(launch,),
            features=[Feature.ATOMICS] + [Feature.GRIDDEPCONTROL] * pdl,
            workspaces=(Workspace(name="ws_values", nbytes=4 * blocks), Workspace(name="ws_indices", nbytes=4 * blocks),
                        Workspace(name="counter", nbytes=4, zeroed=True)),
        )
