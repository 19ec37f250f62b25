"""What a compilation says while it runs: frozen values for one observer. Progress, logs and event hooks are all fed from these."""

from collections.abc import Callable, Mapping
from typing import Any

from attrs import Factory, frozen

from ..errors import Failure
from ..ir.record import TuningRecord


@frozen(kw_only=True)
class Event:
    """Base of every event."""


@frozen(kw_only=True)
class ModelLoaded(Event):
    """A frontend opened the model."""

    name: str
    seconds: float


@frozen(kw_only=True)
class WorkloadChosen(Event):
    """What is compiled for."""

    dtype: str
    max_context: int
    chunks: tuple[int, ...]


@frozen(kw_only=True)
class Captured(Event):
    """Graphs are there, from the store or the frontend; ``eager_reason`` says why there are none."""

    graphs: int
    nodes: int
    eager_reason: str
    seconds: float


@frozen(kw_only=True)
class StageStarted(Event):
    """A stage of the pipeline began."""

    stage: str


@frozen(kw_only=True)
class StageFinished(Event):
    """A stage of the pipeline ended, with its counts. Hook: ``agentcompile_stage_finished``."""

    stage: str
    seconds: float
    facts: Mapping[str, int] = Factory(dict)


@frozen(kw_only=True)
class AdviceGiven(Event):
    """An advisor answered about a region: what of it was refused (rule id and item), or why there is no answer."""

    region: str
    advisor: str
    refused: tuple[str, ...] = ()
    error: str = ""


@frozen(kw_only=True)
class SearchStarted(Event):
    """One round of evaluation began: how many candidates, how many of them are in the store, seconds until it is stopped."""

    total: int
    cached: int
    left_s: float


@frozen(kw_only=True)
class CandidateFinished(Event):
    """One candidate is known, evaluated now or before. ``baseline_us`` is the framework's time, 0: unknown; ``seconds`` what the
    candidate took of the search, 0: it was known.

    Hook: ``agentcompile_candidate_finished``.
    """

    record: TuningRecord
    cached: bool
    baseline_us: float = 0.0
    seconds: float = 0.0


@frozen(kw_only=True)
class Skipped(Event):
    """Something is not tried, and why."""

    subject: str
    message: str


@frozen(kw_only=True)
class WinnerRefused(Event):
    """A validator of winners refused a step that had passed."""

    step: str
    message: str


@frozen(kw_only=True)
class RegionSelected(Event):
    """What one region got, by the isolated timings."""

    region: str
    signature: str
    basis: str
    steps: tuple[str, ...]
    us: float
    baseline_us: float


@frozen(kw_only=True)
class ChainProgress(Event):
    """What the captured chain is working on."""

    what: str


@frozen(kw_only=True)
class Preparing(Event):
    """A program is being bound and captured for its session."""

    graph: str


@frozen(kw_only=True)
class StoreMiss(Event):
    """Something in the store could not be read, so it is made again."""

    key: str


@frozen(kw_only=True)
class NotStored(Event):
    """Something is made anew each time, since what it depends on has no stable digest."""

    subject: str
    reason: str


@frozen(kw_only=True)
class Warned(Event):
    """Something that the user should know, such as a cache folder that cannot be written."""

    message: str


@frozen(kw_only=True)
class FailureRecorded(Event):
    """A failure was recorded; ``first`` tells whether it is the first of its kind. Hook: ``agentcompile_failed``."""

    failure: Failure
    first: bool


Observer = Callable[[Event], None]


def silent(event: Event) -> None:
    """The observer that watches nothing."""


def hook_of(event: Event) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of the plugins' hook that an event calls, if it has one."""
    if isinstance(event, StageFinished):
        return "agentcompile_stage_finished", {"stage": event.stage, "seconds": event.seconds, "facts": dict(event.facts)}
    if isinstance(event, CandidateFinished):
        return "agentcompile_candidate_finished", {"record": event.record}
    if isinstance(event, FailureRecorded):
        return "agentcompile_failed", {"failure": event.failure}
    return None
