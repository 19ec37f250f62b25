"""Stage advise: ask the advisor about each region, check every item, and turn what is left into an order of evaluation."""

import logging
import time
from collections.abc import Iterable, Mapping

from attrs import evolve

from ...budget import ADVICE_SHARE
from ...context import Context
from ...errors import AgentCompileError, Cause, ContractError, Failure, StageName, last_frames
from ...ir.advice import Advice, AdviceRecord, Evidence, Hint, OrderedPlan, Question
from ...ir.plan import PlanSpace, RegionPlan, Schedule, Step, StepSpace
from ...ir.record import TuningRecord
from ...ir.region import Region
from ...plugin.events import AdviceGiven
from ...plugin.interfaces import Advisor
from ...plugin.secrets import scrubbed
from .asking import Late, Raised, ask, described

DIVERSITY = 2  # schedules of every implementation that are measured whatever the advice says, its own best guess among them
OTHERS_WEIGH = 0.1  # of the budget that a match of a favoured cover gets, for a match of other covers only
FASTEST = 4  # measurements of one implementation of one match that an advisor sees
_MISSING = object()
log = logging.getLogger(__name__)
Shares = dict[tuple[str, str], int]  # (signature, match id) -> plans


def run(plans: tuple[RegionPlan, ...], records: tuple[TuningRecord, ...], round_number: int, ctx: Context) -> tuple[OrderedPlan, ...]:
    """Order the steps to evaluate in this round, region by region.

    What was evaluated already is left out; the budget of plans is shared among matches by the bytes they move. An
    advisor that fails is recorded, and the heuristic order stands (raised where the catalog is strict).

    Raises:
        UsageError: no advisor of the configured name is installed.
    """
    advisor = ctx.catalog.find("agentcompile_advisors", ctx.config.advisor)
    budget = max(1, ctx.config.budget_plans // max(1, ctx.config.rounds))
    expected = _shares(plans, budget, {})
    stop_at = time.monotonic() + ADVICE_SHARE * ctx.budget.left_s("search")
    answers: dict[str, AdviceRecord] = {}
    for plan in plans:
        space, left_s = plan.space, stop_at - time.monotonic()
        question = Question(summary=plan.summary, space=space, target=ctx.target.name, evidence=evidence(records, space),
                            round=round_number, budget_s=max(0.0, left_s),
                            budget_plans=sum(expected.get((space.signature, m), 0) for m in _match_ids(space)))
        answers[space.signature] = _ask(advisor, question, plan.region, ctx)
        _tell(plan.region, answers[space.signature], ctx)
    shares = _shares(plans, budget, answers)
    return tuple(_ordered(plan, answers[plan.signature], _done(records, plan.space), shares) for plan in plans)


def _ask(advisor: Advisor, question: Question, region: Region, ctx: Context) -> AdviceRecord:
    began = time.monotonic()
    record = AdviceRecord(advisor=advisor.name, signature=question.space.signature, round=question.round, accepted=Advice())
    if not question.space.steps:
        return record
    if question.budget_s <= 0:
        return evolve(record, error="the time budget was spent on earlier answers")
    try:
        accepted, rejected, tokens = ask(advisor, question)
    except Late as exc:
        return _lost(advisor, record, region, exc, Cause.TIMEOUT, began, ctx)
    except Raised as exc:
        assert exc.__cause__ is not None
        return _lost(advisor, record, region, exc.__cause__, _cause(exc.__cause__), began, ctx)
    return evolve(record, accepted=accepted, rejected=rejected, seconds=time.monotonic() - began, tokens=tokens)


def _cause(exc: BaseException) -> Cause:
    """What kind of failure an advisor's exception is: its own sentence that it cannot answer, a broken rule, or a fault."""
    if isinstance(exc, ContractError):
        return Cause.CONTRACT
    return Cause.UNAVAILABLE if isinstance(exc, AgentCompileError) else Cause.EXCEPTION


def _lost(advisor: Advisor, record: AdviceRecord, region: Region, exc: BaseException, cause: Cause, began: float,
          ctx: Context) -> AdviceRecord:
    """The run goes on with the heuristic order; a strict one ends with what the advisor raised."""
    message = str(exc) if isinstance(exc, Late) else described(exc)
    if ctx.catalog.strict:
        raise exc if isinstance(exc, Exception) and not isinstance(exc, Late) else ContractError(message)
    ctx.fail(Failure(stage=StageName.ADVISE, cause=cause, plugin=advisor.name, subject=f"region {region.name}", message=message,
                     traceback=scrubbed(last_frames(exc))))
    return evolve(record, error=message, seconds=time.monotonic() - began)


def _tell(region: Region, record: AdviceRecord, ctx: Context) -> None:
    refused = [f"{item.rule} {item.item}" for item in record.rejected]
    for line in refused:
        log.info("advice of %s for %s refused: %s", record.advisor, region.name, line)
    ctx.emit(AdviceGiven(region=region.name, advisor=record.advisor, refused=tuple(refused), error=record.error))


def evidence(records: tuple[TuningRecord, ...], space: PlanSpace) -> tuple[Evidence, ...]:
    """Earlier rounds of one region as the advisor sees them: numbers and closed words.

    Of each implementation of each match the fastest few and one of each class of failure, so that questions stay short.
    """
    groups: dict[tuple[str, str], list[Evidence]] = {}
    for record in records:
        if record.signature == space.signature:
            groups.setdefault((record.step.match_id, record.step.implementation), []).append(_evidence(record))
    found: list[Evidence] = []
    for group in groups.values():
        found += sorted((e for e in group if not e.failure), key=lambda e: e.us or float("inf"))[:FASTEST]
        found += {e.failure: e for e in group if e.failure}.values()
    return tuple(found)


def _evidence(record: TuningRecord) -> Evidence:
    measured = record.measurement
    return Evidence(match_id=record.step.match_id, implementation=record.step.implementation, schedule=record.step.schedule.items,
                    verdict=record.verdict.outcome.value if record.verdict else "none", us=measured.us if measured else 0.0,
                    floor_us=measured.floor_us if measured else 0.0, registers=record.resources.registers,
                    shared_bytes=record.resources.shared_bytes, failure=record.failure.value if record.failure else "")


def _shares(plans: tuple[RegionPlan, ...], budget: int, answers: Mapping[str, AdviceRecord]) -> Shares:
    """Plans per match: DIVERSITY of each of its implementations at least, the rest by bytes moved.

    Matches outside the planner's favourite cover, and outside the one that the advisor likes best, weigh a tenth.
    """
    weights: dict[tuple[str, str], float] = {}
    least: Shares = {}
    for region, space in ((plan.region, plan.space) for plan in plans):
        used = {m for cover in space.covers for m in cover.matches}
        favoured = {*_primary(space, Advice()), *_primary(space, _accepted(answers, space))}
        for match_id in sorted(used.intersection(_match_ids(space))):
            moved = max(1.0, region.match_by_id[match_id].bytes_moved * len(region.instances))
            weights[(space.signature, match_id)] = moved**0.5 * (1.0 if match_id in favoured else OTHERS_WEIGH)
            least[(space.signature, match_id)] = DIVERSITY * len(space.spaces_of(match_id))
    total = sum(weights.values()) or 1.0
    return {key: max(least[key], round(budget * weight / total)) for key, weight in weights.items()}


def _accepted(answers: Mapping[str, AdviceRecord], space: PlanSpace) -> Advice:
    record = answers.get(space.signature)
    return record.accepted if record is not None else Advice()


def _match_ids(space: PlanSpace) -> tuple[str, ...]:
    return tuple(dict.fromkeys(step.match_id for step in space.steps))


def _primary(space: PlanSpace, advice: Advice) -> tuple[str, ...]:
    """Matches of the cover to evaluate first: of those with matches the advisor's best, else the planner's favourite."""
    place = {rank: i for i, rank in enumerate(advice.cover_order)}
    covers = [cover for cover in space.covers if cover.matches]
    return min(covers, key=lambda c: (place.get(c.rank, len(place)), c.rank)).matches if covers else ()


def _done(records: tuple[TuningRecord, ...], space: PlanSpace) -> frozenset[Step]:
    return frozenset(record.step for record in records if record.signature == space.signature)


def _ordered(plan: RegionPlan, record: AdviceRecord, done: frozenset[Step], shares: Shares) -> OrderedPlan:
    space = plan.space
    chosen: list[tuple[Step, int]] = []
    for match_id in _match_ids(space):
        fresh = [(step, rank) for step, rank in _interleaved(space.spaces_of(match_id), record.accepted) if step not in done]
        chosen += fresh[:shares.get((space.signature, match_id), 0)]
    return OrderedPlan(plan=plan, steps=tuple(step for step, _ in chosen), ranks=tuple(rank for _, rank in chosen),
                       record=record, primary=_primary(space, record.accepted))


def _interleaved(spaces: Iterable[StepSpace], advice: Advice) -> list[tuple[Step, int]]:
    """Implementations in the advised order, a few of each first, then the rest by turns."""
    position = {name: i for i, name in enumerate(advice.order)}
    ordered = sorted(spaces, key=lambda s: position.get(s.implementation, len(position)))
    queues = [[(Step(match_id=s.match_id, implementation=s.implementation, origin=s.origin, schedule=point), rank)
               for point, rank in _points(s, advice)] for s in ordered]
    found = [entry for queue in queues for entry in queue[:DIVERSITY]]
    rests = [queue[DIVERSITY:] for queue in queues]
    for turn in range(max((len(rest) for rest in rests), default=0)):
        found += [rest[turn] for rest in rests if turn < len(rest)]
    return found


def _points(space: StepSpace, advice: Advice) -> list[tuple[Schedule, int]]:
    """Schedules of one space with the advisor's ranks (-1: it said nothing): those that agree with the hints first.

    Equal ones keep the family's order. The family's own best guess is among the first DIVERSITY, whatever the hints say.
    """
    hints = [h for h in advice.hints if h.match_id == space.match_id and h.implementation == space.implementation]
    points = space.space.points
    if not hints or not points:
        return [(point, -1) for point in points]

    def distance(point: Schedule) -> int:
        return sum(_place(dict(point.items).get(hint.parameter, _MISSING), hint) for hint in hints)

    ranked = [(point, rank) for rank, point in enumerate(sorted(points, key=distance))]
    best = next(i for i, (point, _) in enumerate(ranked) if point == points[0])
    if best >= DIVERSITY:
        ranked.insert(DIVERSITY - 1, ranked.pop(best))
    return ranked


def _place(value: object, hint: Hint) -> int:
    return hint.values.index(value) if value in hint.values else len(hint.values) + 4  # type: ignore[arg-type]
