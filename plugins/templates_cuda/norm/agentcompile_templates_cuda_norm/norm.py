"""The norm family: RMS and layer norm of rows, optionally of a residual sum, with a pointwise tail, or of two values at once."""

from typing import Literal

from agentcompile_cuda_kit import block_needs

from agentcompile_core.plugin_api import (
    NORM,
    DType,
    Match,
    Needs,
    Reject,
    Schedule,
    ScheduleSpace,
    StepSource,
    Target,
    TemplateFamily,
)

from .lowering import AUX, LOWER, NORMS, POINTERS, early_weights, rows_each_of
from .space import WARP, shape_of, space_of, vectors_each

DTYPES = (DType.F16, DType.BF16, DType.F32)
PARAMETERS = ("weight", "bias", "weight_beside")  # of one type, which need not be that of the rows


class NormFamily(TemplateFamily):
    """``norm`` matches: [rows, columns] normalized row by row, with weight and bias where they exist, of columns or of channels."""

    name = "norm"
    version = 5

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True where rows have one floating point type, parameters one, and what is held of a row fits into the registers of a block."""
        if match.kind != NORM:
            return Reject(f"norm serves {NORM} matches, not {match.kind}")
        if match.text("norm") not in NORMS:
            return Reject(f"unknown norm {match.text('norm')!r}; served are {', '.join(NORMS)}")
        for names, what in ((PARAMETERS, "weights"), (tuple(o.name for o in match.operands if o.name not in PARAMETERS), "rows")):
            dtypes = {operand.spec.dtype for operand in match.operands if operand.name in names}
            if len(dtypes) > 1 or not dtypes <= set(DTYPES):
                return Reject(f"{what} of types {', '.join(sorted(d.value for d in dtypes))}; one of float16, bfloat16, float32 is served")
        if match.text("norm") == "rms" and {o.spec.dtype for o in match.operands if o.name in PARAMETERS} - {match.need("x").spec.dtype}:
            return Reject("a norm that is rounded before its weight has a weight of the same type")
        if not {o.name for o in match.operands} <= set(POINTERS):
            return Reject(f"operands {', '.join(o.name for o in match.operands)}; served are {', '.join(POINTERS)}")
        if match.text("norm").endswith("one_plus") and match.operand("weight") is None:
            return Reject(f"{match.text('norm')} needs a weight")
        if (match.operand("residual") is None) != (match.operand("residual_out") is None):
            return Reject("a residual and its sum come together")
        beside = [match.operand(name) is not None for name in ("x_beside", "out_beside", "weight_beside")]
        plain = len(match.operands) == 2 * (2 + beside[2]) and match.epilogue is None
        if any(beside) and not (beside[0] and beside[1] and plain and beside[2] == (match.operand("weight") is not None)):
            return Reject("rows beside others have what those have: a weight or none, and nothing else")
        if not self.space(match, target).points:
            return Reject(f"a row of {shape_of(match).columns} elements beside others does not fit into the registers of one block")
        return True

    def needs(self, match: Match, schedule: Schedule, target: Target) -> Needs:
        """Registers by what a thread holds, elements as floats and all else as it is stored; measured with nvcc 13, else nothing."""
        warps_per_row = int(dict(schedule.items).get("warps_per_row", 0))
        if not warps_per_row:
            return Needs()
        shape, threads = shape_of(match), schedule.integer("threads")
        vectors = vectors_each(shape, WARP * warps_per_row)
        weights = shape.weight_words * (vectors if early_weights(match, warps_per_row, threads, target) else 1)
        others = sum(match.operand(name) is not None for name in ("residual", *AUX))
        return block_needs(target, threads=threads, registers=rows_each_of(schedule) * vectors * (shape.step + 4 * others) + weights + 24)

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """At most 24 points: rows in registers of a warp or a block, weights kept over many rows, long rows over several blocks."""
        return space_of(match, target)

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch; two with a workspace for what parts add up to where rows are split."""
        return LOWER[str(dict(schedule.items).get("path", "held"))](match, schedule, target)
