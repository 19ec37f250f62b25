"""Stage lower: ordered steps become candidates, each with its source. Plugin code runs under guard; sources are checked."""

from ..context import Context
from ..errors import Cause, ContractError, Failure, StageName, last_frames
from ..ir.advice import OrderedPlan
from ..ir.candidate import Candidate
from ..ir.plan import Step
from ..plugin.time_limit import OutOfTime
from ..runtime.sources import source_of


def run(ordered: tuple[OrderedPlan, ...], ctx: Context) -> tuple[Candidate, ...]:
    """Lower the steps of every region in their order.

    A step that cannot be lowered is a recorded failure; an implementation that breaks its contract, or does not come back, is left
    out for the rest of the stage.
    """
    found: list[Candidate] = []
    switched_off: set[str] = set()
    for one in ordered:
        for step in one.steps:
            if step.implementation in switched_off:
                continue
            match = one.plan.region.match_by_id[step.match_id]
            try:
                found.append(Candidate(signature=one.signature, step=step, source=source_of(step, match, ctx.catalog, ctx.target)))
            except (ContractError, OutOfTime) as exc:
                switched_off.add(step.implementation)
                _fail(step, Cause.TIMEOUT if isinstance(exc, OutOfTime) else Cause.CONTRACT, exc, ctx)
            except (Exception, SystemExit) as exc:
                _fail(step, Cause.EXCEPTION, exc, ctx)
    return tuple(found)


def _fail(step: Step, cause: Cause, exc: BaseException, ctx: Context) -> None:
    ctx.fail(Failure(stage=StageName.LOWER, cause=cause, plugin=step.implementation, subject=str(step),
                     message=f"{type(exc).__name__}: {exc}"[:2000], traceback=last_frames(exc)))
