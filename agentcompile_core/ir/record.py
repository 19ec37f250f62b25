"""What was measured, under the fixed protocol, and what the tuning database keeps of it."""

from attrs import Factory, frozen

from ..errors import Cause
from .candidate import Resources
from .plan import Step
from .verdict import Verdict


@frozen(kw_only=True)
class Measurement:
    """Timings of one thing: median over ``repetitions`` of time per run by events of the device, cold weights."""

    us: float  # microseconds per run, median
    spread_us: float  # half the distance between the 10th and the 90th percentile
    repetitions: int
    floor_us: float = 0.0  # bytes that must move over the read ceiling

    @property
    def share_of_floor(self) -> float:
        """Floor over time: 1.0 is the memory roofline."""
        return self.floor_us / self.us if self.us else 0.0


@frozen(kw_only=True)
class TuningRecord:
    """One evaluated candidate: enough to select without building or timing it again. ``key`` covers every input of the evaluation."""

    key: str
    signature: str  # of the region
    step: Step
    source_digest: str
    verdict: Verdict | None
    measurement: Measurement | None
    resources: Resources = Factory(Resources)
    failure: Cause | None = None  # None: it did not fail
    message: str = ""
    advisor: str = ""
    advisor_rank: int = -1  # the advisor's rank of it; -1: it said nothing
    order: int = 0  # position in which it was evaluated
    built: bool = True  # there was a kernel to run, or a callable

    @property
    def passed(self) -> bool:
        """Whether validators passed it and nothing was found to be wrong with it while it was timed."""
        return self.verdict is not None and self.verdict.passed and self.failure is None

    @property
    def usable(self) -> bool:
        """Whether it passed validation and has a time."""
        return self.verdict is not None and self.verdict.passed and self.measurement is not None
