"""Questions to try an advisor on, from none at all to many: made up, but shaped as the stages make them."""

from ..ir.advice import Evidence, Question
from ..ir.plan import Cover, Fusion, Origin, Parameter, PlanSpace, Schedule, ScheduleSpace, StepSpace
from ..ir.region import MatchSummary, RegionSummary, SemanticLabel
from ..ir.verdict import Outcome

TILES = (8, 16, 32, 64)


def question(matches: int = 3, families: int = 2, tiles: int = 3, *, round_number: int = 0, budget_s: float = 5.0) -> Question:
    """A question about one region: each of ``matches`` is served by ``families``, each with two parameters.

    From round 1 on it holds evidence: a measurement of the first schedule of every step, and one failure.
    """
    tried = TILES[:tiles]
    points = tuple(Schedule({"tile": tile, "staged": staged}) for tile in tried for staged in (True, False))
    parameters = (Parameter(name="tile", values=tried), Parameter(name="staged", values=(True, False)))
    space = ScheduleSpace(parameters=parameters, points=points)
    ids = tuple(f"linear:n{m}+1:n{m}" for m in range(matches))
    steps = tuple(StepSpace(match_id=m, implementation=f"family{f}/family{f}", origin=Origin.GENERATED, version=1, space=space)
                  for m in ids for f in range(families))
    covers = tuple(Cover(matches=ids[: i + 1], fusion=Fusion.PARTIAL, rank=i) for i in range(matches))
    return Question(summary=_summary(ids), space=PlanSpace(signature=f"region{matches}", covers=covers, steps=steps), target="h200",
                    evidence=_evidence(steps) if round_number else (), round=round_number, budget_s=budget_s, budget_plans=8 * matches)


def _summary(ids: tuple[str, ...]) -> RegionSummary:
    matches = tuple(MatchSummary(
        id=m, label=SemanticLabel.GEMV, kind="linear", operators=("linear",), shapes=((1, 1, 64), (48, 64), (1, 1, 48)), dtype="float16",
        reduction_axis=-1, flops=6144, bytes=6368) for m in ids)
    return RegionSummary(signature=f"region{len(ids)}", label=SemanticLabel.GEMV, operators=(("linear", len(ids)),), instances=2,
                         matches=matches, dominant=SemanticLabel.GEMV)


def _evidence(steps: tuple[StepSpace, ...]) -> tuple[Evidence, ...]:
    timed = tuple(Evidence(match_id=s.match_id, implementation=s.implementation, schedule=s.space.points[0].items,
                           verdict=Outcome.PASS.value, us=3.0 + i, floor_us=2.0, registers=64) for i, s in enumerate(steps))
    failed = tuple(Evidence(match_id=s.match_id, implementation=s.implementation, schedule=s.space.points[-1].items,
                            verdict=Outcome.FAIL.value, failure="tolerance") for s in steps[:1])
    return timed + failed
