"""What validation found, and what it is given: trials, cases, checks, verdicts."""

import enum

from attrs import field, frozen

from ..errors import Cause
from .candidate import StepSource
from .graph import Graph
from .region import Match
from .target import Target
from .words import word


class Outcome(enum.Enum):
    """The result of a check or of a whole validation."""

    PASS = "pass"
    FAIL = "fail"
    PROVISIONAL = "provisional"  # passed where it cannot be timed: never used on a GPU before it is measured


@frozen(kw_only=True)
class Check:
    """One thing that was checked. ``max_abs`` and ``max_rel`` are errors against the fp64 oracle; ``budget_use`` is error over budget."""

    name: str  # the case, or what else was looked at
    outcome: Outcome
    detail: str = ""  # what was seen: operand, element, how far off
    max_abs: float = 0.0
    max_rel: float = 0.0
    budget_use: float = 0.0


@frozen(kw_only=True)
class Verdict:
    """All checks of one candidate by one validator; passes only if every check does."""

    validator: str
    outcome: Outcome
    checks: tuple[Check, ...] = ()
    cause: Cause | None = None  # None: it passed
    message: str = ""  # one sentence for a person; empty: it passed

    @property
    def passed(self) -> bool:
        """Whether it may be timed (provisional results may not be selected on a GPU)."""
        return self.outcome is not Outcome.FAIL


class InputFamily(enum.StrEnum):
    """The core's ways to draw the inputs of a case. Any other lower_snake_case word names one that a match kind draws itself."""

    NORMAL = "normal"
    NORMAL_SMALL = "normal_small"
    NORMAL_LARGE = "normal_large"
    INTEGERS = "integers"
    ONE_HOT = "one_hot"
    SPIKY = "spiky"  # one element in 200 is 50 times as large; one is 8, and so are a few weights; biases go to 300
    LARGE_MEAN = "large_mean"  # a mean far above the deviation: variances cancel
    TIES = "ties"  # the largest element several times
    ONE_HUGE = "one_huge"  # one activation of 2^14
    MAX_FINITE = "max_finite"  # some elements at the ends of the type's range
    NAN = "nan"  # NaN in elements that are used, of the case's ``carrier``: they must reach every result that depends on them
    INFINITE = "infinite"  # one infinity of either sign
    ALL_MINUS_INF = "all_minus_inf"
    LARGE_MEAN_BELOW = "large_mean_below"  # LARGE_MEAN below zero: what stands for elements that are not there may not be the largest


@frozen(kw_only=True)
class Case:
    """One set of inputs: made from the seed, never stored. ``position`` is the decode position where the match has one.

    ``misaligned``: buffers begin at addresses that are multiples of no more than the runtime promises (16 bytes; of an element
    where an operand's size is no multiple of 16), ``alone``: only that of the operand called so. ``weights_seed``: what weights
    are drawn from where several cases share them, since they are large and drawn on the host; 0: the case's own seed. ``carrier``:
    the one operand that holds the NaN of its family, since the NaN of one hides that of another; empty: every input has one.
    """

    family: str = field(converter=word)  # an InputFamily, or a word of the match kind
    seed: int
    position: int = 0
    misaligned: bool = False
    alone: str = ""
    weights_seed: int = 0
    carrier: str = ""


@frozen(kw_only=True)
class Trial:
    """A candidate on trial: the nodes it replaces as a graph, its source and the cases. A value that ``serial`` can write."""

    match: Match
    graph: Graph = field(repr=False)
    source: StepSource = field(repr=False)
    target: Target
    cases: tuple[Case, ...]
    kind: str = "step"  # what is on trial


@frozen(kw_only=True)
class Rejudged:
    """What became of a step of somebody else's program. ``why`` it may not run (empty: it passed); ``on_record``: the store knew."""

    why: str = ""
    on_record: bool = False
