"""The gather family: embedding lookup."""

from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import c_type, make_source, operand_pointer

from agentcompile_core.plugin_api import (
    GATHER,
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

TEMPLATE = Path(__file__).with_name("gather.cu")
DTYPES = (DType.F16, DType.BF16, DType.F32)
MOST_ROWS = 65535  # rows are the second dimension of the grid


class GatherFamily(TemplateFamily):
    """``gather`` matches: rows of a [vocabulary, columns] table by int64 ids."""

    name = "gather"
    version = 1

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True for int64 ids and a floating point table of the output's type."""
        if match.kind != GATHER:
            return Reject(f"gather serves {GATHER} matches, not {match.kind}")
        ids, table, out = (match.need(name).spec for name in ("ids", "table", "out"))
        if ids.dtype is not DType.I64 or table.dtype not in DTYPES or out.dtype is not table.dtype:
            return Reject(f"{ids.dtype.value} ids and {table.dtype.value} table; int64 ids and a float table are served")
        if match.integer("rows") > MOST_ROWS:
            return Reject(f"{match.integer('rows')} rows; at most {MOST_ROWS} are served")
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """Up to three block sizes."""
        threads = (128, 256, 64)
        return ScheduleSpace(parameters=(Parameter(name="threads", values=threads),),
                             points=tuple(Schedule({"threads": t}) for t in threads))

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch, no workspace."""
        threads = schedule.integer("threads")
        rows, columns = match.integer("rows"), match.integer("columns")
        dtype = match.need("table").spec.dtype
        vector = 16 // dtype.bytes
        pdl = target.has(Feature.GRIDDEPCONTROL)
        launch = Launch(
            entry="gather_kernel", grid=(-(-columns // (threads * vector)), rows, 1), block=(threads, 1, 1), pdl=pdl,
            arguments=(*(operand_pointer(match, name) for name in ("ids", "table", "out")), i32("rows", rows), i32("columns", columns)),
        )
        return make_source(TEMPLATE, plan={"T": c_type(dtype), "threads": threads, "pdl": pdl},
                           launches=(launch,), features=[Feature.GRIDDEPCONTROL] * pdl)
