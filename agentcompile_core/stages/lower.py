"""Stage lower: ordered steps become candidates, each with its source. Plugin code runs under guard; sources are checked."""

from ..context import Context
from ..errors import Cause, ContractError, Failure, StageName, last_frames
from ..ir.advice import OrderedPlan
from ..ir.candidate import CALLABLE, Candidate, StepSource
from ..ir.plan import Step
from ..ir.region import Match, Region
from ..ir.source_check import check_source
from ..runtime.executables import call_key


def run(regions: tuple[Region, ...], ordered: tuple[OrderedPlan, ...], ctx: Context) -> tuple[Candidate, ...]:
    """Lower the steps of every region in their order.

    A step that cannot be lowered is a recorded failure; an implementation that breaks its contract is left out for the
    rest of the stage.
    """
    by_signature = {region.signature: region for region in regions}
    found: list[Candidate] = []
    switched_off: set[str] = set()
    for plan in ordered:
        for step in plan.steps:
            if step.implementation in switched_off:
                continue
            match = by_signature[plan.signature].match_by_id[step.match_id]
            try:
                found.append(Candidate(signature=plan.signature, step=step, source=source_of(step, match, ctx)))
            except ContractError as exc:
                switched_off.add(step.implementation)
                _fail(step, Cause.CONTRACT, exc, ctx)
            except Exception as exc:
                _fail(step, Cause.EXCEPTION, exc, ctx)
    return tuple(found)


def source_of(step: Step, match: Match, ctx: Context) -> StepSource:
    """The checked source of one step.

    Raises:
        ContractError: the implementation is unknown, returned something else, or its source does not fit the match.
    """
    family = ctx.catalog.template_families.get(step.implementation)
    if family is None:
        return _callable_source(step, match, ctx)
    source = family.lower(match, step.schedule, ctx.target)
    if not isinstance(source, StepSource):
        raise ContractError(f"{step.implementation} lowered to {type(source).__name__}, not StepSource")
    check_source(match, source, ctx.target)
    return source


def _callable_source(step: Step, match: Match, ctx: Context) -> StepSource:
    """No text, nothing to build: the digest says which implementation, version, schedule and match are judged."""
    version = version_of(step, ctx)
    return StepSource(language=CALLABLE, digest=call_key(step, version, match), code="", launches=(), reduction_depth=0)


def version_of(step: Step, ctx: Context) -> int:
    """The installed version of what serves a step.

    Raises:
        ContractError: no plugin offers it.
    """
    catalog = ctx.catalog
    offer = catalog.template_families.get(step.implementation) or catalog.implementations.get(step.implementation)
    if offer is None:
        raise ContractError(f"no plugin offers {step.implementation}")
    return offer.version


def _fail(step: Step, cause: Cause, exc: Exception, ctx: Context) -> None:
    ctx.fail(Failure(stage=StageName.LOWER, cause=cause, plugin=step.implementation, subject=str(step),
                     message=f"{type(exc).__name__}: {exc}"[:2000], traceback=last_frames(exc)))
