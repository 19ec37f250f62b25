"""``norm``: RMS norm of rows, with the residual addition before it where the match has one."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from agentcompile_core.plugin_api import (
    NORM,
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

NORMS = ("rms", "rms_once", "rms_one_plus")
OPERANDS = frozenset(("x", "residual", "weight", "out", "residual_out"))
LONGEST = 16384  # elements of a row: 32 registers of each thread of 16 warps
WARPS = (1, 2, 4, 8, 16)
EACH = (8, 16, 4)  # elements of a thread, the best guess first


class TritonNorm(Implementation):
    """``out = rms_norm(x)`` or ``residual_out = x + residual; out = rms_norm(residual_out)``, a program per row."""

    name = "norm"
    version = 1
    origin = Origin.HANDWRITTEN
    capturable = True

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """RMS norms over the last axis with nothing behind them; where nothing is rounded before it, a weight may have another type."""
        if match.kind != NORM:
            return Reject("serves norm matches only")
        if match.text("norm") not in NORMS:
            return Reject(f"a {match.text('norm')} norm; the kernel computes {', '.join(NORMS)}")
        others = sorted({operand.name for operand in match.operands} - OPERANDS)
        if others or match.epilogue is not None or match.integer("groups", 1) != 1 or match.integer("span", 1) != 1:
            return Reject(f"the kernel norms rows by one weight, with nothing behind and nothing beside{_named(others)}")
        if match.operand("residual_out") is not None and match.operand("residual") is None:
            return Reject("a sum is written only where something is added")
        x, weight = match.need("x"), match.operand("weight")
        if match.integer("columns") > LONGEST or match.integer("rows") * match.integer("columns") != x.spec.numel:
            return Reject(f"rows of {match.integer('columns')} elements; a program holds up to {LONGEST}")
        if match.text("norm") == "rms_one_plus" and weight is None:
            return Reject("rms_one_plus needs a weight")
        rows = [operand for operand in match.operands if operand is not weight]
        why_not = unserved(*rows, *([weight] if match.text("norm") == "rms" else [])) or unserved(weight) or absent()
        return Reject(why_not) if why_not else True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """Up to three numbers of warps, by how many elements of a row a thread holds."""
        block = block_of(match.integer("columns"))
        warps = dict.fromkeys(warps_for(block, each) for each in EACH)
        return ScheduleSpace(parameters=(Parameter(name="num_warps", values=WARPS),),
                             points=tuple(Schedule({"num_warps": count}) for count in warps))

    def bind(self, match: Match, schedule: Schedule, target: Target) -> "Callable[..., None]":
        """``run(x, out[, residual][, weight][, residual_out])``."""
        from .kernels import rms_norm

        columns, eps, norm = match.integer("columns"), match.number("norm_eps"), match.text("norm")
        launch, warps = rms_norm[(match.integer("rows"),)], schedule.integer("num_warps")
        block = block_of(columns)

        def run(x: "Tensor", out: "Tensor", residual: "Tensor | None" = None, weight: "Tensor | None" = None,
                residual_out: "Tensor | None" = None) -> None:
            launch((x, residual, weight), (out, residual_out), columns, eps, NORM=norm, BLOCK=block, num_warps=warps)

        return run


def block_of(columns: int) -> int:
    """The power of two at or above a row's length."""
    return 1 << (columns - 1).bit_length()


def _named(others: list[str]) -> str:
    return f", not {', '.join(others)}" if others else ""
