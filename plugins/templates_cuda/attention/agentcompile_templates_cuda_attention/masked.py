"""The masked attention family: attention of all rows of a module at once, over operands in any steps."""

from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import c_type, make_source, operand_pointer

from agentcompile_core.plugin_api import (
    MASKED_ATTENTION,
    DType,
    Feature,
    KernelArgument,
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
    i64,
)

TEMPLATE = Path(__file__).with_name("masked_attention.cu")
DTYPES = (DType.F16, DType.BF16, DType.F32)
MASKS = {"none": 0, "seen": 1, "added": 2}  # as in masked_attention.cu
WARP = 32
WIDEST = 256  # channels of a head: a lane holds an eighth of the row it makes
SHARED_BYTES = 48 * 1024
MOST_HEADS, MOST_EXTENT = 65535, 2**31 - 1
STEPS = tuple(f"{name}_{axis}" for name in "qkv" for axis in ("offset", "batch", "head", "row"))
MASK_STEPS = tuple(f"mask_{axis}" for axis in ("offset", "batch", "head", "row", "column"))
OUT_STEPS = tuple(f"out_{axis}" for axis in ("batch", "head", "row"))


class MaskedAttentionFamily(TemplateFamily):
    """``masked_attention`` matches: a warp makes one or more rows of a head, and a block's rows share the keys that it reads."""

    name = "masked_attention"
    version = 1

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True for heads of at most 256 channels of one type, float16, bfloat16 or float32."""
        if match.kind != MASKED_ATTENTION:
            return Reject(f"masked_attention serves {MASKED_ATTENTION} matches, not {match.kind}")
        dtypes = {match.need(name).spec.dtype for name in ("q", "k", "v", "out")}
        if len(dtypes) != 1 or not dtypes <= set(DTYPES):
            return Reject(f"operands of types {', '.join(sorted(d.value for d in dtypes))}; one of float16, bfloat16, float32 is served")
        mask = match.operand("mask")
        if mask is not None and mask.spec.dtype not in (*DTYPES, DType.BOOL):
            return Reject(f"the mask is {mask.spec.dtype.value}; bool, float16, bfloat16 and float32 are served")
        if max(match.integer("head_dim"), match.integer("value_dim")) > WIDEST:
            return Reject(f"heads of {match.integer('head_dim')} channels; at most {WIDEST} are served")
        if match.integer("batch") * match.integer("heads") > MOST_HEADS or max(match.integer("rows"), match.integer("keys")) > MOST_EXTENT:
            return Reject("more heads than a grid counts in its second dimension, or more rows than an int")
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """At most 7 points: warps per block and rows per warp, as far as shared memory holds their queries."""
        wanted = ((4, 2), (4, 1), (8, 2), (8, 1), (4, 4), (2, 1), (1, 1))
        enough = [point for point in wanted if point[0] * point[1] < 2 * match.integer("rows") or point == (1, 1)]
        points = [Schedule({"warps": warps, "rows_per_warp": rows}) for warps, rows in enough
                  if _shared_bytes(match, warps * rows) <= SHARED_BYTES]
        parameters = tuple(Parameter(name=name, values=tuple(sorted({point[name] for point in points})))
                           for name in ("rows_per_warp", "warps"))
        return ScheduleSpace(parameters=parameters, points=tuple(points))

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch, no workspace."""
        warps, rows = schedule.integer("warps"), schedule.integer("rows_per_warp")
        pdl, mask = target.has(Feature.GRIDDEPCONTROL), match.operand("mask")
        launch = Launch(entry="masked_attention_kernel", block=(warps * WARP, 1, 1), pdl=pdl, arguments=_arguments(match),
                        grid=(-(-match.integer("rows") // (warps * rows)), match.integer("batch") * match.integer("heads"), 1))
        dtype = match.need("q").spec.dtype
        plan = {"T": c_type(dtype), "M": c_type(mask.spec.dtype if mask is not None else dtype), "warps": warps, "rows_per_warp": rows,
                "head_dim": match.integer("head_dim"), "value_dim": match.integer("value_dim"), "mask": MASKS[match.text("mask")],
                "causal": match.flag("causal"), "hold_values": _holds_values(match), "pdl": pdl}
        return make_source(TEMPLATE, plan=plan, launches=(launch,), features=[Feature.GRIDDEPCONTROL] * pdl,
                           reduction_depth=max(match.integer("head_dim"), match.integer("keys")))


def _holds_values(match: Match) -> bool:
    """Whether a tile of V lies in shared memory beside that of K; heads wider than 128 are read where they are."""
    return max(match.integer("head_dim"), match.integer("value_dim")) <= 128


def _shared_bytes(match: Match, rows: int) -> int:
    width = match.integer("head_dim")
    return 4 * (rows * width + WARP * (width + 1) + (WARP * match.integer("value_dim") if _holds_values(match) else 0))


def _arguments(match: Match) -> tuple[KernelArgument, ...]:
    pointers = (operand_pointer(match, name) for name in ("q", "k", "v", "mask", "out"))
    steps = (i64(name, match.integer(name)) for name in (*STEPS, *MASK_STEPS, *OUT_STEPS))
    sizes = (i32("heads", match.integer("heads")), i32("group", match.integer("heads") // match.integer("kv_heads")),
             i32("rows", match.integer("rows")), i32("keys", match.integer("keys")), f32("scale", match.number("scale")))
    return (*pointers, *sizes, *steps)
