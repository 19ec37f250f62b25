"""What could be done with a region: schedules, spaces, covers. All bounded, all made by the compiler."""

import enum
from functools import cached_property

from attrs import field, frozen

from .region import Region, RegionSummary, Scalar


class Origin(enum.Enum):
    """Who wrote an implementation."""

    GENERATED = "generated"
    HANDWRITTEN = "handwritten"
    THIRD_PARTY = "third_party"
    FRAMEWORK = "framework"


def _sorted_items(items: dict[str, Scalar] | tuple[tuple[str, Scalar], ...]) -> tuple[tuple[str, Scalar], ...]:
    return tuple(sorted(dict(items).items()))


@frozen
class Schedule:
    """One point of a ScheduleSpace: parameter names and values, sorted by name. Build from a dict or from pairs."""

    items: tuple[tuple[str, Scalar], ...] = field(converter=_sorted_items)  # sorted by name

    def __getitem__(self, name: str) -> Scalar:
        return self._values[name]

    def integer(self, name: str) -> int:
        """The value of ``name`` as an int."""
        return int(self._values[name])

    @cached_property
    def _values(self) -> dict[str, Scalar]:
        return dict(self.items)

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.items)


@frozen(kw_only=True)
class Parameter:
    """One choice of a space: its name and the closed list of its values."""

    name: str
    values: tuple[Scalar, ...]  # the closed list


@frozen(kw_only=True)
class ScheduleSpace:
    """All legal schedules of one family for one match, best guess first. At most 256 points.

    ``ruled_out``: why others are not among them (registers, shared memory, blocks per SM), and how many for each reason.
    """

    parameters: tuple[Parameter, ...]
    points: tuple[Schedule, ...]  # legal combinations, best guess first
    ruled_out: tuple[tuple[str, int], ...] = ()  # reason, schedules

    def __contains__(self, schedule: object) -> bool:
        return schedule in self._index

    def __len__(self) -> int:
        return len(self.points)

    @cached_property
    def _index(self) -> frozenset[Schedule]:
        return frozenset(self.points)


MAX_POINTS = 256
MAX_COVERS = 16


@frozen(kw_only=True)
class Needs:
    """What a family expects one schedule to need of the hardware, before it is built; 0: it does not say."""

    threads: int = 0  # of a block
    registers: int = 0  # per thread
    most_registers: int = 0  # that a thread may have
    shared_bytes: int = 0  # per block, static and dynamic


class RiskLevel(enum.Enum):
    """How near a plan is to what the hardware allows."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@frozen(kw_only=True)
class PlanRisk:
    """The level of a plan, and why it is not low."""

    level: RiskLevel = RiskLevel.LOW
    reason: str = ""


@frozen(kw_only=True)
class StepSpace:
    """One implementation of one match, with its space. ``implementation`` is the qualified name ``<entry point>/<name>``.

    ``risk`` is that of the best guess.
    """

    match_id: str
    implementation: str
    origin: Origin
    version: int  # of the family or implementation
    space: ScheduleSpace
    risk: PlanRisk = field(factory=PlanRisk)


@frozen(kw_only=True)
class Step:
    """Match + implementation + schedule: what is lowered, validated, cached, timed alone and advised on."""

    match_id: str
    implementation: str  # <entry point>/<name>
    origin: Origin
    schedule: Schedule

    def __str__(self) -> str:
        return f"{self.implementation}[{self.schedule}] on {self.match_id}"


class Fusion(enum.Enum):
    """How much of a region a cover fuses."""

    FULL = "full"
    PARTIAL = "partial"
    NONE = "none"
    FRAMEWORK = "framework"


@frozen(kw_only=True)
class Cover:
    """Disjoint matches of a region; its other nodes stay on the framework. ``rank`` 0 is the planner's favourite."""

    matches: tuple[str, ...]  # ids
    fusion: Fusion
    rank: int  # 0: the favourite


@frozen(kw_only=True)
class PlanSpace:
    """The bounded space of one region: at most 16 ranked covers, one ScheduleSpace per match and implementation."""

    signature: str
    covers: tuple[Cover, ...]  # best first
    steps: tuple[StepSpace, ...]
    rejects: tuple[tuple[str, str, str], ...] = ()  # match id, implementation, reason
    broken: tuple[tuple[str, str, str], ...] = ()  # match id, implementation, what its plugin raised instead of an answer

    @property
    def candidates(self) -> int:
        """Number of steps in the space."""
        return sum(len(step.space) for step in self.steps)

    def spaces_of(self, match_id: str) -> tuple[StepSpace, ...]:
        """The step spaces of one match."""
        return tuple(step for step in self.steps if step.match_id == match_id)


@frozen(kw_only=True)
class RegionPlan:
    """One merged region, its summary, and its space, which travel together. An advisor sees the last two of them."""

    region: Region
    summary: RegionSummary
    space: PlanSpace

    @property
    def signature(self) -> str:
        """The region's."""
        return self.region.signature
