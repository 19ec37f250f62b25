"""``rope``: the rotation of the heads of one token by given cos and sin."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from agentcompile_core.plugin_api import (
    ROPE,
    DType,
    Implementation,
    Match,
    Origin,
    Parameter,
    Reject,
    Schedule,
    ScheduleSpace,
    Target,
)

from .package import absent, unserved, warps_for

if TYPE_CHECKING:
    from torch import Tensor

STYLES = ("half", "interleaved")
BLOCKS = (256, 512, 128)  # elements of a program, the best guess first
EACH = 2  # of a thread
LARGEST = 2**31 - 1 - max(BLOCKS)  # elements that the kernel's 32-bit indices count


class TritonRope(Implementation):
    """Whole heads or parts of them, whose other channels are copied from the same operand; pairs by halves or side by side."""

    name = "rope"
    version = 1
    origin = Origin.HANDWRITTEN
    capturable = True

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """Heads of one operand in one type; tables and result may be float32."""
        if match.kind != ROPE:
            return Reject("serves rope matches only")
        if match.text("style", "half") not in STYLES:
            return Reject(f"pairs of style {match.text('style')}; the kernel turns {' and '.join(STYLES)}")
        if match.operand("rest") is not None or match.flag("apart"):
            return Reject("the kernel reads one operand whose channels lie in the order of the result")
        x, cos, sin, out = (match.need(name) for name in ("x", "cos", "sin", "out"))
        why_not = _beyond(match)
        if not why_not and cos.spec.dtype is not sin.spec.dtype:
            why_not = f"cos in {cos.spec.dtype.value} and sin in {sin.spec.dtype.value}"
        why_not = why_not or unserved(x, cos, also=(DType.F32,)) or unserved(x, out, also=(DType.F32,))
        if not why_not and x.spec.dtype is DType.F32 and {cos.spec.dtype, out.spec.dtype} != {DType.F32}:
            why_not = "x in float32 with tables or a result in less"
        why_not = why_not or absent()
        return Reject(why_not) if why_not else True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """Three block sizes."""
        return ScheduleSpace(parameters=(Parameter(name="block", values=BLOCKS),), points=tuple(Schedule({"block": b}) for b in BLOCKS))

    def bind(self, match: Match, schedule: Schedule, target: Target) -> "Callable[..., None]":
        """``run(x, cos, sin, out)``."""
        from .kernels import rotate

        head = (*(match.integer(name) for name in ("heads", "head_dim", "rotary_dim")), match.integer("first", 0))
        places, block = _places(match), schedule.integer("block")
        launch, warps = rotate[(-(-head[0] * head[1] // block),)], warps_for(block, EACH)
        is_interleaved = match.text("style", "half") == "interleaved"

        def run(x: "Tensor", cos: "Tensor", sin: "Tensor", out: "Tensor") -> None:
            launch((x, cos, sin), out, head, places, INTERLEAVED=is_interleaved, BLOCK=block, num_warps=warps)

        return run


def _places(match: Match) -> tuple[int, int, int, int]:
    """Where the rotated channels of a head begin and how far heads lie apart, and the same of its other channels, in elements."""
    width = match.integer("head_dim")
    return (match.integer("x_first", 0), match.integer("x_step", width), match.integer("rest_first", match.integer("rotary_dim")),
            match.integer("rest_step", width))


def _beyond(match: Match) -> str:
    """Why the numbers of a match would have the kernel read or write outside of its operands; empty if they do not."""
    heads, head_dim, rotary_dim = (match.integer(name) for name in ("heads", "head_dim", "rotary_dim"))
    x_first, x_step, rest_first, rest_step = _places(match)
    at = match.integer("first", 0)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim or not 0 <= at <= head_dim - rotary_dim:
        return f"a rotary part of {rotary_dim} from {at} on in heads of {head_dim}; it must be even and inside the head"
    if any(match.need(name).spec.numel != rotary_dim for name in ("cos", "sin")) or match.need("out").spec.numel != heads * head_dim:
        return f"tables must have {rotary_dim} elements and the result {heads} heads of {head_dim}"
    held = match.need("x").spec.numel
    for first, step, length in ((x_first, x_step, rotary_dim), (rest_first, rest_step, head_dim - rotary_dim)):
        if length and not 0 <= first <= first + (heads - 1) * step + length <= held:
            return f"{heads} heads of {length} elements from {first} on, {step} apart, in {held} of x"
    return "" if max(held, heads * head_dim) <= LARGEST else f"{max(held, heads * head_dim)} elements; the kernel counts {LARGEST}"
