"""Stage advise: ask the advisor about each region, check every item, and turn what is left into an order of evaluation."""

import time
from collections.abc import Iterable

from ..advice import Advice, AdviceRecord, Evidence, OrderedPlan, Question
from ..context import Context
from ..errors import Cause, Failure, StageName, UsageError
from ..plan import PlanSpace, Schedule, Step, StepSpace
from ..record import TuningRecord
from ..region import Region, RegionSummary
from ..screening import screen

DIVERSITY = 2  # schedules of every implementation that are measured whatever the advice says


def run(regions: tuple[Region, ...], summaries: tuple[RegionSummary, ...], spaces: tuple[PlanSpace, ...],
        records: tuple[TuningRecord, ...], round_number: int, ctx: Context) -> tuple[OrderedPlan, ...]:
    """Order the steps to evaluate in this round, region by region.

    What was evaluated already is left out; the budget of plans is shared among matches by the bytes they move.

    Raises:
        UsageError: no advisor of the configured name is installed.
    """
    advisor = ctx.catalog.find("agentcompile_advisors", ctx.config.advisor)
    budget = max(1, ctx.config.budget_plans // max(1, ctx.config.rounds))
    shares = _shares(regions, spaces, budget)
    plans = []
    for region, summary, space in zip(regions, summaries, spaces, strict=True):
        question = Question(summary=summary, space=space, target=ctx.target.name, evidence=evidence(records, space), round=round_number,
                            budget_s=ctx.config.budget_s, budget_plans=sum(shares.get((space.signature, s.match_id), 0) for s in space.steps))
        record = _ask(advisor, question, ctx)
        ctx.report("advice", {"region": region.name, "advisor": advisor.name, "rejected": len(record.rejected), "error": record.error})
        done = {(r.step.match_id, r.step.implementation, r.step.schedule) for r in records if r.signature == space.signature}
        plans.append(_ordered(space, record, done, shares))
    return tuple(plans)


def _ask(advisor, question: Question, ctx: Context) -> AdviceRecord:  # type: ignore[no-untyped-def]
    began = time.monotonic()
    common = {"advisor": advisor.name, "signature": question.space.signature, "round": question.round}
    if not question.space.steps:
        return AdviceRecord(accepted=Advice(), **common)
    try:
        answer = advisor.advise(question)
        if not isinstance(answer, Advice):
            raise UsageError(f"advisor {advisor.name} returned {type(answer).__name__}, not Advice")
    except Exception as exc:  # the run goes on with the heuristic order
        message = f"{type(exc).__name__}: {exc}"[:300]
        ctx.fail(Failure(stage=StageName.ADVISE, cause=Cause.UNAVAILABLE, plugin=advisor.name, subject=question.space.signature, message=message))
        return AdviceRecord(accepted=Advice(), error=message, seconds=time.monotonic() - began, **common)
    accepted, rejected = screen(answer, question)
    return AdviceRecord(accepted=accepted, rejected=rejected, seconds=time.monotonic() - began, tokens=answer.tokens, **common)


def evidence(records: tuple[TuningRecord, ...], space: PlanSpace) -> tuple[Evidence, ...]:
    """Earlier rounds of one region as the advisor sees them: numbers and closed words."""
    return tuple(
        Evidence(match_id=r.step.match_id, implementation=r.step.implementation, schedule=r.step.schedule.items,
                 verdict=r.verdict.outcome.value if r.verdict else "none", us=r.measurement.us if r.measurement else 0.0,
                 floor_us=r.measurement.floor_us if r.measurement else 0.0, registers=r.resources.registers,
                 shared_bytes=r.resources.shared_bytes, failure=r.failure.value if r.failure else "")
        for r in records if r.signature == space.signature
    )


def _shares(regions: tuple[Region, ...], spaces: tuple[PlanSpace, ...], budget: int) -> dict[tuple[str, str], int]:
    """Plans per match: at least DIVERSITY each, the rest by bytes moved; matches outside the favourite cover weigh a tenth."""
    weights: dict[tuple[str, str], float] = {}
    for region, space in zip(regions, spaces, strict=True):
        used = {m for cover in space.covers for m in cover.matches}
        primary = _primary(space)
        for match_id in {s.match_id for s in space.steps} & used:
            match = region.match_by_id[match_id]
            moved = max(1.0, match.bytes_moved * len(region.instances))
            weights[(space.signature, match_id)] = moved**0.5 * (1.0 if match_id in primary else 0.1)
    total = sum(weights.values()) or 1.0
    return {key: max(DIVERSITY, round(budget * weight / total)) for key, weight in weights.items()}


def _primary(space: PlanSpace) -> tuple[str, ...]:
    return min(space.covers, key=lambda c: c.rank).matches if space.covers else ()


def _ordered(space: PlanSpace, record: AdviceRecord, done: set, shares: dict[tuple[str, str], int]) -> OrderedPlan:  # type: ignore[type-arg]
    steps: list[Step] = []
    ranks: list[int] = []
    for match_id in dict.fromkeys(s.match_id for s in space.steps):
        queue = _interleaved(space.spaces_of(match_id), record.accepted)
        fresh = [(step, rank) for step, rank in queue if (step.match_id, step.implementation, step.schedule) not in done]
        for step, rank in fresh[:shares.get((space.signature, match_id), 0)]:
            steps.append(step)
            ranks.append(rank)
    return OrderedPlan(signature=space.signature, steps=tuple(steps), ranks=tuple(ranks), record=record,
                       primary=_primary(space))


def _interleaved(spaces: Iterable[StepSpace], advice: Advice) -> list[tuple[Step, int]]:
    """Implementations in the advised order, a few of each first, then the rest by turns."""
    position = {name: i for i, name in enumerate(advice.order)}
    ordered = sorted(spaces, key=lambda s: position.get(s.implementation, len(position)))
    queues = [[(Step(match_id=s.match_id, implementation=s.implementation, origin=s.origin, schedule=point), rank)
               for point, rank in _points(s, advice)] for s in ordered]
    found: list[tuple[Step, int]] = []
    for queue in queues:
        found += queue[:DIVERSITY]
    rests = [queue[DIVERSITY:] for queue in queues]
    for turn in range(max((len(r) for r in rests), default=0)):
        found += [rest[turn] for rest in rests if turn < len(rest)]
    return found


def _points(space: StepSpace, advice: Advice) -> list[tuple[Schedule, int]]:
    """Schedules of one space, those that agree with the hints first; equal ones keep the family's order."""
    hints = [h for h in advice.hints if h.match_id == space.match_id and h.implementation == space.implementation]

    def distance(point: Schedule) -> int:
        return sum(h.values.index(point[h.parameter]) if point[h.parameter] in h.values else len(h.values) + 4 for h in hints)

    if not hints:
        return [(point, -1) for point in space.space.points]
    return [(point, rank) for rank, point in enumerate(sorted(space.space.points, key=distance))]
