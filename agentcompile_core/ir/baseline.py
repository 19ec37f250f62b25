"""The record that holds the framework's time of a match: a step like any other, served by the original operators."""

from .plan import Origin, Schedule, Step

FRAMEWORK = "framework"  # implementation of the record that holds a match's baseline


def baseline_step(match_id: str) -> Step:
    """The step under which the framework's time of a match is recorded."""
    return Step(match_id=match_id, implementation=FRAMEWORK, origin=Origin.FRAMEWORK, schedule=Schedule({}))
