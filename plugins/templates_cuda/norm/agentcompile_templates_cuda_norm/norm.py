"""The norm family: RMS and layer norm of rows, optionally of a residual sum, with a pointwise tail, or of two values at once."""

from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import block_needs, c_type, epilogue_struct, make_source, operand_pointer

from agentcompile_core.plugin_api import (
    NORM,
    DType,
    Feature,
    KernelArgument,
    Launch,
    Match,
    Needs,
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

TEMPLATE, LOOPED = (Path(__file__).with_name(name) for name in ("norm.cu", "norm_looped.cu"))
DTYPES = (DType.F16, DType.BF16, DType.F32)
NORMS = {"rms": 1, "rms_one_plus": 2, "layer": 3, "rms_once": 4}  # as ac::Norm in row.cuh
WARP = 32
MOST_VECTORS = 4  # 16-byte vectors of a row that a thread holds in registers
LOOPED_FROM = 12288  # elements of a row that pay for reading it more than once
PARAMETERS = ("weight", "bias", "weight_beside")  # of one type, which need not be that of the rows
AUX = ("aux0", "aux1")
POINTERS = ("x", "weight", "bias", "residual", *AUX, "out", "residual_out", "x_beside", "weight_beside", "out_beside")


class NormFamily(TemplateFamily):
    """``norm`` matches: [rows, columns] normalized row by row, with weight and bias where they exist, of columns or of channels."""

    name = "norm"
    version = 3

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
        if match.text("norm") == "rms_one_plus" and match.operand("weight") is None:
            return Reject("rms_one_plus needs a weight")
        if (match.operand("residual") is None) != (match.operand("residual_out") is None):
            return Reject("a residual and its sum come together")
        beside = [match.operand(name) is not None for name in ("x_beside", "out_beside", "weight_beside")]
        plain = len(match.operands) == 2 * (2 + beside[2]) and match.epilogue is None
        if any(beside) and not (beside[0] and beside[1] and plain and beside[2] == (match.operand("weight") is not None)):
            return Reject("rows beside others have what those have: a weight or none, and nothing else")
        if not self.space(match, target).points:
            return Reject(f"a row of {match.integer('columns')} elements does not fit into the registers of one block")
        return True

    def needs(self, match: Match, schedule: Schedule, target: Target) -> Needs:
        """Registers by the vectors of a row that a thread holds as floats, of layer norms twice, measured with nvcc 13; else nothing."""
        warps_per_row = int(dict(schedule.items).get("warps_per_row", 0))
        if not warps_per_row:
            return Needs()
        held = _vectors(match, warps_per_row) * (16 // match.need("x").spec.dtype.bytes)
        early = _early_weights(match, warps_per_row, schedule.integer("threads"), target)
        registers = 2 * held + 24 if match.text("norm") != "layer" else 4 * held + 16 if early else 2 * held + 32
        registers += held * sum(match.operand(name) is not None for name in AUX)
        return block_needs(target, threads=schedule.integer("threads"), registers=registers)

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """At most 8 points: a warp per row where rows are short and many, else one block per row, which reads long ones again."""
        points = [Schedule({"threads": threads, "warps_per_row": warps_per_row})
                  for threads, warps_per_row in _ordered(match) if _vectors(match, warps_per_row) <= MOST_VECTORS]
        alone = match.operand("residual") is None and match.operand("x_beside") is None and match.epilogue is None
        if match.integer("columns") >= LOOPED_FROM and alone:
            points += [Schedule({"path": "looped", "threads": threads}) for threads in (1024, 512)]
        names = sorted({name for point in points for name, _ in point.items})
        parameters = tuple(Parameter(name=name, values=tuple(sorted({v for point in points for own, v in point.items if own == name})))
                           for name in names)
        return ScheduleSpace(parameters=parameters, points=tuple(points))

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch, no workspace."""
        if dict(schedule.items).get("path") == "looped":
            return _looped(match, schedule.integer("threads"), target)
        threads, warps_per_row = schedule.integer("threads"), schedule.integer("warps_per_row")
        vectors = _vectors(match, warps_per_row)
        dtype = match.need("x").spec.dtype
        pdl = target.has(Feature.GRIDDEPCONTROL)
        rows, beside = match.integer("rows"), match.operand("x_beside") is not None
        rows_beside = match.integer("rows_beside", 0)
        rows_per_block = threads // WARP // warps_per_row
        launch = Launch(
            entry="norm_kernel", grid=(-(-max(rows, rows_beside) // rows_per_block), 1 + beside, 1), block=(threads, 1, 1), pdl=pdl,
            arguments=(*(operand_pointer(match, name) for name in POINTERS), i32("rows", rows), i32("columns", match.integer("columns")),
                       i32("rows_beside", rows_beside), i32("columns_beside", match.integer("columns_beside", 0)),
                       f32("eps", match.number("norm_eps")), *_channels(match)),
        )
        return make_source(
            TEMPLATE,
            plan={**_plan(match, threads, pdl), "warps_per_row": warps_per_row, "vectors": vectors,
                  "has_residual": match.operand("residual") is not None, "beside": beside,
                  "early_weights": _early_weights(match, warps_per_row, threads, target),
                  **{f"has_{name}": match.operand(name) is not None for name in AUX}},
            launches=(launch,),
            epilogue=epilogue_struct(match.epilogue, 1, len(AUX)),
            features=[Feature.GRIDDEPCONTROL] * pdl,
            reduction_depth=vectors * (16 // dtype.bytes) + (WARP * warps_per_row).bit_length(),
        )


def _early_weights(match: Match, warps_per_row: int, threads: int, target: Target) -> bool:
    """Whether weights are read before the wait for what comes before: where each SM has a block or two, and nothing else to do."""
    rows = max(match.integer("rows"), match.integer("rows_beside", 0))
    return -(-rows * WARP * warps_per_row // threads) <= 2 * target.sm_count


def _looped(match: Match, threads: int, target: Target) -> StepSource:
    columns, pdl = match.integer("columns"), target.has(Feature.GRIDDEPCONTROL)
    launch = Launch(entry="norm_looped_kernel", grid=(match.integer("rows"), 1, 1), block=(threads, 1, 1), pdl=pdl,
                    arguments=(*(operand_pointer(match, name) for name in ("x", "weight", "bias", "out")), i32("columns", columns),
                               f32("eps", match.number("norm_eps")), *_channels(match)))
    return make_source(LOOPED, plan=_plan(match, threads, pdl), launches=(launch,), features=[Feature.GRIDDEPCONTROL] * pdl,
                       reduction_depth=-(-columns // threads) + threads.bit_length())


def _plan(match: Match, threads: int, pdl: bool) -> dict[str, bool | int | float | str]:
    weight = match.operand("weight") or match.operand("bias") or match.need("x")
    return {"T": c_type(match.need("x").spec.dtype), "W": c_type(weight.spec.dtype), "threads": threads,
            "norm": NORMS[match.text("norm")], "pdl": pdl,
            "channels": match.integer("groups", 1) > 1 or match.integer("span", 1) > 1,
            "has_weight": match.operand("weight") is not None, "has_bias": match.operand("bias") is not None}


def _channels(match: Match) -> tuple[KernelArgument, KernelArgument]:
    """How many rows have weights of their own, and how many neighbours in one share a weight."""
    return i32("groups", match.integer("groups", 1)), i32("span", match.integer("span", 1))


def _ordered(match: Match) -> list[tuple[int, int]]:
    blocks = [(threads, threads // WARP) for threads in (256, 128, 512, 1024, 64)]
    warp = (128, 1)
    return [warp, *blocks] if match.integer("rows") > 1 and match.integer("columns") <= 512 else [*blocks, warp]


def _vectors(match: Match, warps_per_row: int) -> int:
    columns = max(match.integer("columns"), match.integer("columns_beside", 0))
    return -(-columns * match.need("x").spec.dtype.bytes // (16 * WARP * warps_per_row))
