"""A time line of some steps of a decode step, and what it says was lost."""

import statistics
from collections.abc import Sequence
from itertools import pairwise

from attrs import frozen

OUTSIDE = -1  # the layer of what lies outside of layers
Times = tuple[tuple[int, ...], ...]  # per block the nanoseconds at which it passed each phase; 0: it did not


@frozen(kw_only=True)
class PhaseTimes:
    """When the blocks of a launch passed a phase, in microseconds from the beginning of the time line."""

    phase: str
    least_us: float
    mean_us: float
    most_us: float


@frozen(kw_only=True)
class TracedLaunch:
    """One launch: which step it belongs to, what that must move, and when its blocks passed their phases."""

    step: str
    label: str
    layer: int  # or OUTSIDE
    blocks: int
    nbytes: int  # of the whole step; 0 for its second and further launches
    floor_us: float  # of those bytes at the memory bandwidth; 0: not known
    phases: tuple[PhaseTimes, ...]

    def at(self, phase: str) -> PhaseTimes | None:
        """The times of a phase; None where no block passed it."""
        return next((times for times in self.phases if times.phase == phase), None)


@frozen(kw_only=True)
class Loss:
    """Time in which the memory waits: what for, at which step, how long per run of that step and per token."""

    what: str
    step: str
    label: str
    us: float
    token_us: float


@frozen(kw_only=True)
class TimeLine:
    """What a trace found. ``launches`` are in order; ``layer_us`` is from the release of the layer's first step to that of the next
    layer's, ``token_us`` a whole step without notes and ``noted_us`` one with them; ``clock_ns`` is the step of the clock."""

    model: str
    program: str
    position: int
    layer: int
    layers: int
    layer_us: float
    layer_floor_us: float
    token_us: float
    noted_us: float
    clock_ns: int
    launches: tuple[TracedLaunch, ...]
    losses: tuple[Loss, ...]  # largest first


HAND_OVER = "hand-over to the next step"
UNEVEN = "blocks end apart"
FIRST_BYTES = "waits for its first bytes"
BEYOND = "runs longer than its bytes"
WORDS = {
    HAND_OVER: "from the end of the last block until the blocks of the next step are released",
    UNEVEN: "from the mean end of its blocks to the last one",
    FIRST_BYTES: "from the release of its blocks until the first stage has landed",
    BEYOND: "from the release to the mean end, less what its bytes need and what it waits for the first of them",
}


def phase_times(blocks: Times, names: Sequence[str], start_ns: int) -> tuple[PhaseTimes, ...]:
    """Of each phase that some block passed, from ``start_ns`` on."""
    found = []
    for index, name in enumerate(names):
        passed = [times[index] - start_ns for times in blocks if times[index]]
        if passed:
            found.append(PhaseTimes(phase=name, least_us=min(passed) / 1e3, mean_us=statistics.fmean(passed) / 1e3,
                                    most_us=max(passed) / 1e3))
    return tuple(found)


def medians(runs: Sequence[tuple[PhaseTimes, ...]]) -> tuple[PhaseTimes, ...]:
    """The same launch in several runs, as one: the median of each number, of phases that every run has."""
    by_name = [{times.phase: times for times in run} for run in runs]
    shared = [times.phase for times in runs[0] if all(times.phase in names for names in by_name)]
    return tuple(PhaseTimes(phase=name, **{field: statistics.median(getattr(names[name], field) for names in by_name)
                                           for field in ("least_us", "mean_us", "most_us")}) for name in shared)


def losses(launches: Sequence[TracedLaunch], layer: int, layers: int) -> tuple[Loss, ...]:
    """What each launch loses, largest first by what it is per token; launches of ``layer`` stand for those of all ``layers``.

    The last launch has no next one; of launches that noted no release only what needs none is said.
    """
    found = []
    for launch, following in zip(launches, (*launches[1:], None), strict=True):
        released, end, first = launch.at("released"), launch.at("end"), launch.at("first")
        if end is None or launch.layer not in (layer, OUTSIDE):
            continue
        said = {UNEVEN: end.most_us - end.mean_us}
        then = following.at("released") if following is not None and following.layer in (launch.layer, launch.layer + 1) else None
        if then is not None:
            said[HAND_OVER] = then.mean_us - end.most_us
        if released is not None:
            said[FIRST_BYTES] = first.mean_us - released.mean_us if first is not None else 0.0
            said[BEYOND] = end.mean_us - released.mean_us - launch.floor_us - max(0.0, said[FIRST_BYTES]) if launch.floor_us else 0.0
        times = layers if launch.layer == layer else 1
        found += [Loss(what=what, step=launch.step, label=launch.label, us=us, token_us=us * times) for what, us in said.items() if us > 0]
    return tuple(sorted(found, key=lambda loss: -loss.token_us))


def clock_step_ns(runs: Sequence[Times]) -> int:
    """The smallest distance of two times that differ; 0 where all are equal."""
    times = sorted({time for blocks in runs for block in blocks for time in block if time})
    return min((b - a for a, b in pairwise(times)), default=0)
