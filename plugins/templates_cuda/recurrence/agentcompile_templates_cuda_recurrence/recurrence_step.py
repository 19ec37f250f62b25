"""The recurrence_step family: one token of a selective scan or a gated delta rule, its state in place."""

from itertools import product
from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import c_type, epilogue_struct, make_source, operand_pointer
from attrs import frozen

from agentcompile_core.plugin_api import (
    RECURRENCE_STEP,
    WEIGHTS,
    ContractError,
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

TEMPLATE = Path(__file__).with_name("recurrence_step.cu")
DTYPES = (DType.F16, DType.BF16, DType.F32)
OPERANDS = ("state", "x", "keys", "queries", "decay", "decay_bias", "rates", "strength", "skip", "aux0", "aux1", "out")
TYPES = {"x": "X", "keys": "Keys", "queries": "Queries", "decay": "Decay", "decay_bias": "Bias", "rates": "Rates", "strength": "Strength",
         "skip": "Skip", "aux0": "Aux0", "aux1": "Aux1", "out": "T"}
WARP, QUAD = 32, 4
MOST_HELD = 128  # numbers of the state in a thread's registers
NAMES = ("early", "held", "lanes", "warps")
WARPS = (4, 1, 8, 2)
BUSY_WARPS = 8  # of a multiprocessor, which its loads keep busy


@frozen(kw_only=True)
class Shape:
    """Rows of all heads, of a head and of a group that shares keys, terms of a row, and whether rows lie side by side."""

    all_rows: int
    width: int
    rows_of_group: int
    terms: int
    by_rows: bool

    @classmethod
    def of(cls, match: Match) -> "Shape":
        """That of a match."""
        heads, width = match.integer("heads"), match.integer("width")
        return cls(all_rows=heads * width, width=width, rows_of_group=heads // match.integer("groups") * width,
                   terms=match.integer("terms"), by_rows=match.flag("by_rows"))

    def schedules(self) -> list[tuple[int, int]]:
        """Threads of a row and rows of a thread that there are kernels for."""
        found = []
        for lanes, held in product((1, 2, 4, 8, 16, 32), (QUAD,) if self.by_rows else (1, 2, 4, 8)):
            rows, shared = WARP // lanes * held, self.width if self.by_rows else self.rows_of_group
            whole = self.terms % (lanes if self.by_rows else QUAD * lanes) == 0
            if whole and shared % rows == 0 and self.terms // lanes * held <= MOST_HELD:
                found.append((lanes, held))
        return found


class RecurrenceStepFamily(TemplateFamily):
    """``recurrence_step`` matches whose state is float32 and lies by whole quads of terms or of rows."""

    name = "recurrence_step"
    version = 1

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True for floating point operands of any mix of types, where a warp can have whole rows of one group of heads."""
        if match.kind != RECURRENCE_STEP:
            return Reject(f"recurrence_step serves {RECURRENCE_STEP} matches, not {match.kind}")
        for operand in match.operands:
            served = (DType.F32,) if operand.name == "state" else DTYPES
            if operand.spec.dtype not in served:
                return Reject(f"operand {operand.name} is {operand.spec.dtype.value}; served are {', '.join(t.value for t in served)}")
        if not Shape.of(match).schedules():
            return Reject(f"{match.integer('heads')} heads of {match.integer('width')} rows and {match.integer('terms')} terms: no warp has"
                          " whole quads of rows of one group")
        try:
            epilogue_struct(match.epilogue, 1, _aux_count(match))
        except ContractError as error:
            return Reject(f"epilogue: {error}")
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """Threads of a row, rows of a thread, warps of a block; first what gives every multiprocessor eight warps."""
        shape = Shape.of(match)

        def distance(lanes: int, held: int) -> float:
            warps = shape.all_rows / (WARP // lanes * held) / target.sm_count
            return max(warps, BUSY_WARPS) / min(warps, BUSY_WARPS)

        ways = sorted(shape.schedules(), key=lambda way: (distance(*way), way))
        early = (True, False) if target.has(Feature.GRIDDEPCONTROL) else (False,)
        points = tuple(Schedule({"lanes": lanes, "held": held, "warps": warps, "early": e})
                       for (lanes, held), warps, e in product(ways, WARPS, early))
        return ScheduleSpace(points=points, parameters=tuple(
            Parameter(name=name, values=tuple(sorted({point[name] for point in points}))) for name in NAMES))

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch, no workspace."""
        shape, pdl = Shape.of(match), target.has(Feature.GRIDDEPCONTROL)
        lanes, held, warps = (schedule.integer(name) for name in ("lanes", "held", "warps"))
        types = {text: c_type(operand.spec.dtype if (operand := match.operand(name)) is not None else DType.F32)
                 for name, text in TYPES.items()}
        is_known = {f"knows_{text}": (operand := match.operand(name)) is None or operand.role in WEIGHTS
                    for name, text in (("rates", "rates"), ("decay_bias", "bias"), ("skip", "skip"))}
        has = {f"has_{text}": match.operand(name) is not None
               for name, text in (("decay_bias", "bias"), ("skip", "skip"), ("aux0", "aux0"), ("aux1", "aux1"))}
        threads = warps * WARP
        plan = {**types, "threads": threads, "lanes": lanes, "held": held, "terms": shape.terms, "width": shape.width,
                "rows_of_group": shape.rows_of_group, "by_rows": shape.by_rows, "early": bool(schedule["early"]), "pdl": pdl,
                "decay_each": match.integer("decay_each"), "rates_each": match.integer("rates_each"),
                "softplus": match.flag("softplus"), "log_rates": match.flag("log_rates"), "is_scaled": match.flag("scaled"),
                "is_delta": match.operand("strength") is not None, "sigmoid": match.flag("sigmoid"),
                "strength_scale": match.number("strength_scale"), "keys_eps": match.number("keys_eps"),
                "queries_eps": match.number("queries_eps"), "queries_scale": match.number("queries_scale"), **is_known, **has}
        rows_of_block = warps * (WARP // lanes * held)
        launch = Launch(entry="recurrence_step_kernel", grid=(-(-shape.all_rows // rows_of_block), 1, 1), block=(threads, 1, 1), pdl=pdl,
                        arguments=(*(operand_pointer(match, name) for name in OPERANDS), i32("all_rows", shape.all_rows)))
        return make_source(TEMPLATE, plan=plan, launches=(launch,), epilogue=epilogue_struct(match.epilogue, 1, _aux_count(match)),
                           features=[Feature.GRIDDEPCONTROL] * pdl, reduction_depth=shape.terms // lanes + lanes.bit_length() + 4)


def _aux_count(match: Match) -> int:
    return max((index + 1 for index in (0, 1) if match.operand(f"aux{index}") is not None), default=0)
