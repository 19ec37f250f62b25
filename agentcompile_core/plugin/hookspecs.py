"""Every hook of AgentCompile, in the order of the run. Plugins import ``hookimpl`` from here.

All offer hooks take no arguments, are called once per plugin at load inside a guard, and return an iterable of
objects of the class named. None of them decides anything: what is used is chosen by name in the configuration, and
what wins is chosen by evidence. Event hooks are called with keyword arguments; their results are ignored.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from ..errors import Failure
    from ..ir.record import TuningRecord
    from ..ir.target import Target
    from .interfaces import Advisor, Backend, Frontend, Implementation, RegionRule, RuntimeIntegration, TemplateFamily, Validator

PROJECT = "agentcompile"
API = (1, 0)
GROUP = f"agentcompile.v{API[0]}"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def agentcompile_frontends() -> "Iterable[Frontend]":
    """Return frontends (capture): each turns something a user names into a GraphSet. Asked in order of their names."""
    raise AssertionError("a specification is never called")


@hookspec
def agentcompile_region_rules() -> "Iterable[RegionRule]":
    """Return region rules (analyze): each proposes matches with a semantic label; overlaps are welcome."""
    raise AssertionError("a specification is never called")


@hookspec
def agentcompile_template_families() -> "Iterable[TemplateFamily]":
    """Return template families (plan, lower): generated kernels with a bounded schedule space."""
    raise AssertionError("a specification is never called")


@hookspec
def agentcompile_implementations() -> "Iterable[Implementation]":
    """Return hand-written and third-party implementations (plan, lower); they compete with generated ones under their origin."""
    raise AssertionError("a specification is never called")


@hookspec
def agentcompile_advisors() -> "Iterable[Advisor]":
    """Return advisors (advise). One is chosen by name; ``heuristic`` is the default."""
    raise AssertionError("a specification is never called")


@hookspec
def agentcompile_validators() -> "Iterable[Validator]":
    """Return validators (validate). They run in the worker process."""
    raise AssertionError("a specification is never called")


@hookspec
def agentcompile_runtimes() -> "Iterable[RuntimeIntegration]":
    """Return runtime integrations for the roles ``kv_cache`` and ``decode``, resolved by name before capture."""
    raise AssertionError("a specification is never called")


@hookspec
def agentcompile_backends() -> "Iterable[Backend]":
    """Return backends: kinds of hardware that build, launch and time sources."""
    raise AssertionError("a specification is never called")


@hookspec
def agentcompile_targets() -> "Iterable[Target]":
    """Return targets: the hardware by name, its limits and capabilities, and the backend that serves it."""
    raise AssertionError("a specification is never called")


@hookspec
def agentcompile_stage_finished(stage: str, seconds: float, facts: dict[str, int]) -> None:
    """Event: a stage of the pipeline ended. ``facts`` are its counts (nodes, regions, plans, ...)."""


@hookspec
def agentcompile_candidate_finished(record: "TuningRecord") -> None:
    """Event: one candidate was evaluated."""


@hookspec
def agentcompile_failed(failure: "Failure") -> None:
    """Event: a failure was recorded."""
