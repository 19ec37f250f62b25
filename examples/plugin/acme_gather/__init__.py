"""A template family from outside: embedding lookup, in which every warp moves one part of one row."""

from pathlib import Path

from agentcompile_cuda_kit import c_type, make_source

from agentcompile_core.plugin_api import (
    GATHER,
    Access,
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
    hookimpl,
    i32,
    pointer,
)

WARPS = (4, 1, 8)  # of a block
VECTORS = (1, 2, 4)  # 16-byte vectors that each lane moves
MOST_ROWS = 65535  # rows are the second dimension of the grid


class WarpRows(TemplateFamily):
    """``gather`` matches: out[r, :] = table[ids[r], :]."""

    name = "warp_rows"
    version = 1

    def accepts(self, match: Match, target: Target) -> bool | Reject:
        """True for every lookup of at most 65535 rows."""
        if match.kind != GATHER:
            return Reject(f"warp_rows serves {GATHER} matches, not {match.kind}")
        if match.integer("rows") > MOST_ROWS:
            return Reject(f"{match.integer('rows')} rows; warp_rows serves at most {MOST_ROWS}")
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """Block sizes and vectors per lane, as far as a row is long enough to need them; best guess first."""
        row = match.integer("columns") * match.need("table").spec.dtype.bytes
        points = [Schedule({"warps": w, "vectors": v}) for v in VECTORS for w in WARPS if v == 1 or 32 * 16 * v <= row]
        return ScheduleSpace(parameters=(Parameter(name="warps", values=WARPS), Parameter(name="vectors", values=VECTORS)),
                             points=tuple(points))

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch; block x of the grid holds ``warps`` parts of row y."""
        rows, columns = match.integer("rows"), match.integer("columns")
        ids, table, out = (match.need(name) for name in ("ids", "table", "out"))
        warps, part = schedule.integer("warps"), 32 * schedule.integer("vectors") * 16 // table.spec.dtype.bytes
        pdl = target.has(Feature.GRIDDEPCONTROL)  # a kernel may start before the one before it has ended
        launch = Launch(
            entry="warp_rows_kernel", grid=(-(-columns // (warps * part)), rows, 1), block=(32 * warps, 1, 1), pdl=pdl,
            arguments=(pointer("ids", ids.role, ids.spec.dtype), pointer("table", table.role, table.spec.dtype),
                       pointer("out", out.role, out.spec.dtype, Access.WRITE), i32("columns", columns)))
        return make_source(Path(__file__).with_name("gather.cu"), launches=(launch,), features=[Feature.GRIDDEPCONTROL] * pdl,
                           plan={"T": c_type(table.spec.dtype), "warps": warps, "part": part, "pdl": pdl})


@hookimpl
def agentcompile_template_families() -> list[TemplateFamily]:
    """What this distribution offers."""
    return [WarpRows()]
