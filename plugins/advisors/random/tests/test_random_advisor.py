"""The random advisor: repeatable, inside the space, and different from question to question."""

from agentcompile_advisor_random import RandomAdvisor, Settings
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ir.plan import Cover, Fusion, PlanSpace
from agentcompile_core.plugin_api import (
    Advice,
    Origin,
    Parameter,
    Question,
    RegionSummary,
    Schedule,
    ScheduleSpace,
    SemanticLabel,
    StepSpace,
)
from agentcompile_core.stages.advise.advice_check import screen

SUMMARY = RegionSummary(signature="s", label=SemanticLabel.GEMV, operators=(("linear", 1),), instances=2, matches=(),
                        dominant=SemanticLabel.GEMV)
FEW = settings(max_examples=25, derandomize=True, database=None, deadline=None)


def question(matches: int, families: int, values: int, **changes: object) -> Question:
    points = tuple(Schedule({"tile": tile, "fast": tile % 2 == 0}) for tile in range(values))
    space = ScheduleSpace(parameters=(Parameter(name="tile", values=tuple(range(values))), Parameter(name="fast", values=(True, False))),
                          points=points)
    steps = tuple(StepSpace(match_id=f"m:{m}", implementation=f"f{f}/f{f}", origin=Origin.GENERATED, version=1, space=space)
                  for m in range(matches) for f in range(families))
    covers = tuple(Cover(matches=(f"m:{m}",), fusion=Fusion.NONE, rank=m) for m in range(matches))
    return evolve(Question(summary=SUMMARY, space=PlanSpace(signature="s", covers=covers, steps=steps), target="h200"), **changes)


@FEW
@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 8), st.integers(0, 5))
def test_everything_it_says_lies_inside_the_space(matches: int, families: int, values: int, seed: int) -> None:
    asked = question(matches, families, values)
    advice = RandomAdvisor(Settings(seed=seed)).advise(asked)
    accepted, refused = screen(advice, asked)
    assert refused == () and accepted == advice
    assert sorted(advice.order) == sorted({s.implementation for s in asked.space.steps})
    assert sorted(advice.cover_order) == [c.rank for c in asked.space.covers]
    assert len(advice.hints) == 2 * len(asked.space.steps)
    for hint in advice.hints:
        assert sorted(hint.values) == (list(range(values)) if hint.parameter == "tile" else [False, True])


def test_a_run_can_be_repeated_and_seeds_differ() -> None:
    asked = question(6, 3, 8)
    same = RandomAdvisor(Settings(seed=0)).advise(evolve(asked, budget_s=1.0))
    assert RandomAdvisor().advise(asked) == RandomAdvisor().advise(asked) == same
    changed = (evolve(asked, round=1), evolve(asked, target="a100"))
    others = [RandomAdvisor(Settings(seed=1)).advise(asked), *(RandomAdvisor(Settings(seed=0)).advise(other) for other in changed)]
    assert all(other != RandomAdvisor(Settings(seed=0)).advise(asked) for other in others)


def test_an_empty_space_gets_empty_advice() -> None:
    assert RandomAdvisor().advise(question(0, 1, 1)) == Advice()
