"""What a kernel that chooses experts is told (routing.cuh): types, constants, and what it does not serve."""

from agentcompile_cuda_kit import c_type

from agentcompile_core.plugin_api import DType, Match

from .space import MOST_SLOTS, WARP_SIZE

DTYPES = (DType.F16, DType.BF16, DType.F32)
SCORINGS = ("softmax", "sigmoid")
MOST_EXPERTS = 32 * WARP_SIZE


def choice_types(match: Match, bias_name: str) -> dict[str, str]:
    """Of logits, bias and scores; of operands that the match has not, any."""
    operands = {"Logit": "logits", "RouterBias": bias_name, "Score": "scores"}
    return {name: c_type(found.spec.dtype if (found := match.operand(of)) is not None else DType.F32) for name, of in operands.items()}


def choice_facts(match: Match, bias_name: str) -> dict[str, bool | int]:
    """How it is chosen, and how many logits a lane holds."""
    return {"held": -(-match.integer("experts") // WARP_SIZE), "over_chosen": match.flag("over_chosen"),
            "sigmoid": match.text("scoring", "softmax") == "sigmoid", "biased": match.operand(bias_name) is not None,
            "floored": match.flag("floored")}


def choice_problem(match: Match, bias_name: str, experts_name: str) -> str:
    """Why it is not served; empty: it is."""
    experts, slots = match.integer("experts"), match.integer("slots")
    if experts > MOST_EXPERTS or not 1 <= slots <= min(MOST_SLOTS, experts):
        return f"{slots} of {experts} experts; router serves 1 to {MOST_SLOTS} of at most {MOST_EXPERTS}"
    if match.text("scoring", "softmax") not in SCORINGS:
        return f"unknown scoring {match.text('scoring')!r}; served are {', '.join(SCORINGS)}"
    bias = match.operand(bias_name)
    if bias is not None and (bias.spec.dtype not in DTYPES or bias.spec.numel != experts):
        return f"a bias of {bias.spec.numel} {bias.spec.dtype.value} for {experts} experts; one floating point number each is served"
    for name, allowed in (("logits", DTYPES), ("scores", DTYPES), (experts_name, (DType.I64,))):
        dtype = match.need(name).spec.dtype
        if dtype not in allowed:
            return f"{name} are {dtype.value}; {', '.join(each.value for each in allowed)} is served"
    return ""
