"""What an advisor is asked and what it may answer. Data inside the compiler's space, never authority."""

import enum

from attrs import field, frozen

from .plan import PlanSpace, RegionPlan, Step
from .region import RegionSummary, Scalar, SemanticLabel
from .words import optional_word


class Risk(enum.Enum):
    """Risks that an advisor may name; each switches on extra validation cases."""

    RAGGED_TAIL = "ragged_tail"
    MISALIGNED = "misaligned"
    LARGE_VALUES = "large_values"
    CANCELLATION = "cancellation"
    LONG_REDUCTION = "long_reduction"
    SHARED_MEMORY_RACE = "shared_memory_race"
    REGISTER_PRESSURE = "register_pressure"


class Diagnosis(enum.Enum):
    """Why an advisor thinks a candidate failed or was slow."""

    TOO_MANY_REGISTERS = "too_many_registers"
    TOO_MUCH_SHARED_MEMORY = "too_much_shared_memory"
    TOO_FEW_BLOCKS = "too_few_blocks"
    TOO_LITTLE_IN_FLIGHT = "too_little_in_flight"
    LATENCY_BOUND = "latency_bound"
    AT_THE_FLOOR = "at_the_floor"


@frozen(kw_only=True)
class Hint:
    """Values of one parameter, best first, for one match and implementation."""

    match_id: str
    implementation: str  # <entry point>/<name>
    parameter: str
    values: tuple[Scalar, ...]  # best first


SHOWN = 80  # characters of a refused item that are kept


def printable(text: str) -> str:
    """The start of ``text`` for logs and terminals: ASCII without control characters, which an answer may be full of."""
    return (text if text.isascii() and text.isprintable() else ascii(text)[1:-1])[:SHOWN]


@frozen(kw_only=True)
class RejectedItem:
    """One item of an answer that was refused, made printable, and the id of the rule that refused it."""

    item: str = field(converter=printable)
    rule: str  # A1 to A8


@frozen(kw_only=True)
class Advice:
    """An answer: everything optional, everything checked item by item against the space."""

    label: str | None = field(default=None, converter=optional_word)  # one of ``Question.labels``
    order: tuple[str, ...] = ()  # implementations, best first
    cover_order: tuple[int, ...] = ()  # ranks of covers, best first
    hints: tuple[Hint, ...] = ()
    risks: tuple[Risk, ...] = ()  # each adds input cases
    diagnoses: tuple[Diagnosis, ...] = ()  # kept beside the evidence
    refused: tuple[RejectedItem, ...] = ()  # what the reader of a textual answer had to drop, before any check
    tokens: int = 0  # what the answer cost, where a provider says


@frozen(kw_only=True)
class Evidence:
    """One measured fact of an earlier round, as numbers and closed words."""

    match_id: str
    implementation: str
    schedule: tuple[tuple[str, Scalar], ...]
    verdict: str  # an Outcome, or none
    us: float = 0.0  # median time of a run; 0: not timed
    floor_us: float = 0.0  # the time that its bytes need
    registers: int = 0  # per thread
    shared_bytes: int = 0  # per block
    failure: str = ""  # a Cause; empty: none


@frozen(kw_only=True)
class Question:
    """What an advisor sees: the summary, the space, the target preset, evidence so far, the round and the budget left."""

    summary: RegionSummary
    space: PlanSpace
    target: str  # name of the target
    evidence: tuple[Evidence, ...] = ()  # of earlier rounds
    round: int = 0  # from 0
    budget_s: float = 0.0  # for this answer
    budget_plans: int = 0  # candidates that will be evaluated in this round

    @property
    def labels(self) -> tuple[str, ...]:
        """The words that an answer may use as a label: the core's, and those of the kinds in this region."""
        return tuple(dict.fromkeys((*map(str, SemanticLabel), *self.summary.labels)))


@frozen(kw_only=True)
class AdviceRecord:
    """What was asked of whom, what came back, what of it was accepted."""

    advisor: str
    signature: str
    round: int
    accepted: Advice
    rejected: tuple[RejectedItem, ...] = ()
    seconds: float = 0.0  # that the answer took
    tokens: int = 0
    error: str = ""  # empty: it answered


@frozen(kw_only=True)
class OrderedPlan:
    """The steps of one region in the order in which they are to be evaluated this round, and the advice behind it."""

    plan: RegionPlan
    steps: tuple[Step, ...]
    ranks: tuple[int, ...]  # the advisor's rank of each step, -1: it said nothing of it
    record: AdviceRecord
    primary: tuple[str, ...] = ()  # matches of the favourite cover (the advisor's, else the planner's): evaluated before all others

    @property
    def signature(self) -> str:
        """The region's."""
        return self.plan.signature

    @property
    def servers(self) -> tuple[tuple[str, int], ...]:
        """Every implementation of the region's space with its version, sorted."""
        return tuple(sorted({(s.implementation, s.version) for s in self.plan.space.steps}))
