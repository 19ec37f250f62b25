"""What a run decided from, beside its records: covers, matches, the order of its candidates, the margin, and the advice it got.

With the records and selections of the bundle this is enough to make every decision again: see report.audit.
"""

from collections.abc import Iterable

from attrs import field, frozen

from .advice import AdviceRecord
from .evaluated import Evaluated
from .plan import Cover, RegionPlan, Step
from .serial import UNSAID

CHAIN_MARGIN = 0.1  # of the run's margin: the chain compares pairs, which are less noisy than isolated times


def chain_margin(margin: float) -> float:
    """What the chain asks of a challenger; not below 0, where everything that is a little slower would replace what is held."""
    return max(0.0, CHAIN_MARGIN * margin)


@frozen(kw_only=True)
class RegionChoices:
    """What could be chosen for one region: its covers, and the region-local nodes of every match; which of these are views."""

    signature: str
    region: str
    instances: int
    covers: tuple[Cover, ...]
    matches: tuple[tuple[str, tuple[str, ...]], ...]  # id, nodes
    views: tuple[str, ...] = field(default=(), metadata={UNSAID: True})


@frozen(kw_only=True)
class ChainTrial:
    """One thing that the captured chain tried in the place of what it held, and whether it was taken.

    ``beside`` and ``without`` are what it changes together with it: other steps, and steps that go. ``ratio`` is the upper bound of its
    paired time over that of the incumbent; 0: they were not compared. ``refused`` says why the step was wrong with it or, of a removal
    (``step`` is None) without a ratio, with what it removes.
    """

    signature: str
    match_id: str
    step: Step | None
    ratio: float = 0.0
    refused: str = ""
    taken: bool = False
    beside: tuple[tuple[str, Step], ...] = field(default=(), metadata={UNSAID: True})  # signature and step
    without: tuple[tuple[str, str], ...] = field(default=(), metadata={UNSAID: True})  # signature and match id

    @property
    def alone(self) -> bool:
        """Whether it changes one step."""
        return not (self.beside or self.without)

    @property
    def signatures(self) -> frozenset[str]:
        """Of the regions that it changes."""
        return frozenset((self.signature, *(signature for signature, _ in (*self.beside, *self.without))))


@frozen(kw_only=True)
class ChainLog:
    """What the captured chain began with, as signature and step, and what it tried, in order. ``start``: where its range begins;
    ``judged``: the position at which that was tried; ``earlier``: of positions before that, nearest first, what won over what it began
    with."""

    started: tuple[tuple[str, Step], ...]
    trials: tuple[ChainTrial, ...] = ()
    start: int = 0
    judged: int = field(default=0, metadata={UNSAID: True})
    earlier: tuple[tuple[int, float], ...] = field(default=(), metadata={UNSAID: True})


@frozen(kw_only=True)
class Decisions:
    """One run's. ``places`` has an entry per record of the run, in their order: where its candidate stood in this run, -1 where
    the source that was judged is not what its step lowers to here (and for baselines)."""

    margin: float
    advisor: str
    validators: tuple[str, ...]
    backend: str = ""
    competes: bool = True  # whether the framework's operators are among the allowed origins
    regions: tuple[RegionChoices, ...] = ()
    places: tuple[int, ...] = ()
    advice: tuple[AdviceRecord, ...] = ()
    step_us: tuple[float, float] = (0.0, 0.0)  # the shortened step of the chain: with kernels, on the framework
    chain: ChainLog | None = None  # None: no chain judged the selections
    ranges: tuple[ChainLog, ...] = ()  # of later ranges, in their order


def choices_of(plans: Iterable[RegionPlan]) -> tuple[RegionChoices, ...]:
    """What could be chosen for each region."""
    return tuple(RegionChoices(signature=plan.signature, region=plan.region.name, instances=len(plan.region.instances),
                               covers=plan.space.covers, matches=tuple((m.id, m.nodes) for m in plan.region.matches),
                               views=tuple(node.name for node in plan.region.graph.nodes if node.kind == "view"))
                 for plan in plans)


def places_of(found: Evaluated) -> tuple[int, ...]:
    """Where the candidate of each record stood in this run; -1 where this run has no such source."""
    return tuple(found.place(record) if found.source(record) is not None else -1 for record in found.records)
