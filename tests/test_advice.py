"""Advice is never authority: whatever an advisor says, only steps of the space are tried, and the diversity set always is."""

import time

import pytest
from advice_cases import MATCHES, PLAN, QUESTION, SPACE, USED, asked, check_plan, in_space, record_of, steps_of, world
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.configuration import Config
from agentcompile_core.errors import Cause, ContractError, UsageError
from agentcompile_core.ir.advice import Advice, Diagnosis, Hint, Risk
from agentcompile_core.ir.region import SemanticLabel
from agentcompile_core.plugin.events import AdviceGiven
from agentcompile_core.stages import advise
from agentcompile_core.stages.advise.advice_check import MAX_ITEMS, screen

FEW = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])

names = st.sampled_from(["many/many", "some/some", "one/one", "none/none", "", "many"])
scalars = st.sampled_from([16, 17, 20, 35, 36, 1, 2, 4, True, False, 1.0, 16.0, "16", -1, "x", float("inf")])
hints = st.builds(Hint, match_id=st.sampled_from([*MATCHES, "nowhere"]), implementation=names,
                  parameter=st.sampled_from(["tile", "width", "fast", "warp"]), values=st.lists(scalars, max_size=6).map(tuple))
fuzzed = st.builds(Advice, label=st.sampled_from([None, *SemanticLabel]), order=st.lists(names, max_size=8).map(tuple),
                   cover_order=st.lists(st.integers(-2, 20), max_size=8).map(tuple), hints=st.lists(hints, max_size=12).map(tuple),
                   risks=st.lists(st.sampled_from(Risk), max_size=4).map(tuple),
                   diagnoses=st.lists(st.sampled_from(Diagnosis), max_size=4).map(tuple))


@FEW
@given(answer=fuzzed, budget=st.sampled_from((1, 8, 60, 400)))
def test_fuzzed_advice_stays_inside_the_space_and_keeps_the_diversity_set(answer: Advice, budget: int) -> None:
    ordered, space, ctx, _ = asked(answer, budget_plans=budget, rounds=1)
    check_plan(ordered, space)
    kept = ordered.record.accepted
    assert set(kept.order) <= {s.implementation for s in space.steps} and set(kept.cover_order) <= {c.rank for c in space.covers}
    for hint in kept.hints:
        (parameters,) = [s.space.parameters for s in space.steps if (s.match_id, s.implementation) == (hint.match_id, hint.implementation)]
        (values,) = [{(type(v), v) for v in p.values} for p in parameters if p.name == hint.parameter]
        assert hint.values and {(type(v), v) for v in hint.values} <= values
    assert not ctx.failures
    given_items = [*answer.order, *answer.cover_order, *answer.hints]
    kept_items = [*kept.order, *kept.cover_order, *kept.hints]
    assert len(kept_items) + len(ordered.record.rejected) >= len(given_items), "nothing is dropped in silence"


@FEW
@given(answer=fuzzed)
def test_fuzzed_advice_changes_order_and_shares_only(answer: Advice) -> None:
    """With a budget for everything, every step of a used match is tried: advice cannot take one away."""
    ordered, space, _, _ = asked(answer, budget_plans=100000, rounds=1)
    everything = {(s.match_id, s.implementation, p) for s in space.steps if s.match_id in USED for p in s.space.points}
    assert {(s.match_id, s.implementation, s.schedule) for s in ordered.steps} == everything


@pytest.mark.parametrize("answer,rule,item", [
    (Advice(order=("cublas/cublas",)), "A1", "cublas/cublas"),
    (Advice(hints=(Hint(match_id=MATCHES[0], implementation="x/x", parameter="tile", values=(16,)),)), "A1", "x/x"),
    (Advice(hints=(Hint(match_id="m7", implementation="many/many", parameter="tile", values=(16,)),)), "A2", "many/many.tile"),
    (Advice(hints=(Hint(match_id=MATCHES[0], implementation="many/many", parameter="warps", values=(4,)),)), "A3", "warps"),
    (Advice(hints=(Hint(match_id=MATCHES[0], implementation="many/many", parameter="tile", values=(999,)),)), "A4", "999"),
    (Advice(hints=(Hint(match_id=MATCHES[0], implementation="many/many", parameter="tile", values=(16.0,)),)), "A4", "16.0"),
    (Advice(hints=(Hint(match_id=MATCHES[0], implementation="many/many", parameter="fast", values=(1,)),)), "A4", "(1,)"),
    (Advice(order=("one/one", "one/one")), "A5", "one/one"),
    (Advice(hints=(Hint(match_id=MATCHES[0], implementation="many/many", parameter="tile", values=(16,)),) * 2), "A5", "tile"),
    (Advice(risks=(Risk.CANCELLATION, Risk.CANCELLATION)), "A5", "cancellation"),
    (Advice(cover_order=(99,)), "A6", "99"),
    (Advice(order=(*(f"n{i}" for i in range(MAX_ITEMS)), "late")), "A7", "late"),
    (Advice(risks=("everything",)), "A8", "everything"),
    (Advice(label="fast"), "A8", "fast"),
    (Advice(order=(7,)), "A8", "7"),
    (Advice(cover_order=(True,)), "A8", "True"),
    (Advice(hints=("tile=16",)), "A8", "tile=16"),
    (Advice(diagnoses=(Risk.CANCELLATION,)), "A8", "CANCELLATION"),
])
def test_each_rule_of_the_screening(answer: Advice, rule: str, item: str) -> None:
    accepted, refused = screen(answer, QUESTION)
    assert [r.rule for r in refused if item in r.item][-1:] == [rule]
    assert accepted.hints == () or rule in ("A5",)
    assert accepted.label is None and all(isinstance(r, Risk) for r in accepted.risks)


def test_a_hint_keeps_its_legal_values_and_names_the_others() -> None:
    hint = Hint(match_id=MATCHES[0], implementation="many/many", parameter="width", values=(4, 8, 2))
    accepted, refused = screen(Advice(hints=(hint,)), QUESTION)
    assert accepted.hints == (evolve(hint, values=(4, 2)),) and [r.rule for r in refused] == ["A4"]


def test_every_parameter_of_a_large_space_may_be_hinted() -> None:
    many = tuple(Hint(match_id=s.match_id, implementation=s.implementation, parameter=p.name, values=p.values[::-1])
                 for s in SPACE.steps for p in s.space.parameters)
    assert screen(Advice(hints=many), QUESTION) == (Advice(hints=many), ())


def test_refused_text_cannot_reach_a_terminal_as_it_is() -> None:
    accepted, (refused,) = screen(Advice(order=("\x1b[2Jmany/many\r\nok \ud800" + "x" * 500,)), QUESTION)
    assert accepted.order == () and refused.item.isprintable() and refused.item.isascii() and len(refused.item) == 80


# ---- order


def test_the_heuristic_order_is_the_familys_own() -> None:
    assert PLAN.record == evolve(PLAN.record, accepted=Advice(), rejected=(), error="") and set(PLAN.ranks) == {-1}
    favourite = min(SPACE.covers, key=lambda c: c.rank)
    assert PLAN.primary == favourite.matches
    first = [s.schedule for s in PLAN.steps if s.match_id == favourite.matches[0] and s.implementation == "many/many"]
    assert tuple(first) == steps_of(SPACE, favourite.matches[0], "many/many")[: len(first)]


def test_an_advised_order_of_implementations_and_values() -> None:
    target = PLAN.primary[0]
    hint = Hint(match_id=target, implementation="some/some", parameter="width", values=(4, 2))
    ordered, space, _, _ = asked(Advice(order=("one/one", "some/some"), hints=(hint,)))
    mine = [(s, rank) for s, rank in zip(ordered.steps, ordered.ranks, strict=True) if s.match_id == target]
    assert [s.implementation for s, _ in mine][:5] == ["one/one", "some/some", "some/some", "many/many", "many/many"]
    some = [(s.schedule["width"], rank) for s, rank in mine if s.implementation == "some/some"]
    assert some[0] == (4, 0) and some[1][0] == steps_of(space, target, "some/some")[0]["width"] == 1
    assert {rank for s, rank in mine if s.implementation != "some/some"} == {-1}


def test_the_advised_cover_is_evaluated_first_and_the_favourite_keeps_its_share() -> None:
    other = next(c for c in SPACE.covers if c.matches and c.matches != PLAN.primary)
    ordered = asked(Advice(cover_order=(other.rank,)))[0]
    assert ordered.primary == other.matches

    def count(plan_, matches):
        return sum(s.match_id in matches for s in plan_.steps)

    assert count(ordered, other.matches) >= count(PLAN, other.matches)
    empty = next((c.rank for c in SPACE.covers if not c.matches), None)
    if empty is not None:
        assert asked(Advice(cover_order=(empty,)))[0].primary == PLAN.primary


def test_later_rounds_skip_what_was_evaluated_and_see_a_short_account_of_it() -> None:
    done = tuple(record_of(step, us=10.0 + i, failure=Cause.TOLERANCE if i % 3 == 0 else None) for i, step in enumerate(PLAN.steps))
    other = record_of(PLAN.steps[0], signature="elsewhere")
    ordered, space, _, advisor = asked(records=(*done, other), round_number=1)
    assert not set(ordered.steps) & set(PLAN.steps) and all(in_space(step, space) for step in ordered.steps)
    (question,) = advisor.questions
    assert question.round == 1
    groups = {(e.match_id, e.implementation) for e in question.evidence}
    assert groups == {(s.match_id, s.implementation) for s in PLAN.steps}
    for group in groups:
        mine = [e for e in question.evidence if (e.match_id, e.implementation) == group]
        assert len([e for e in mine if e.failure]) <= 1 and len([e for e in mine if not e.failure]) <= advise.FASTEST
        passed = [r.measurement.us for r in done if (r.step.match_id, r.step.implementation) == group and r.measurement]
        assert [e.us for e in mine if not e.failure] == sorted(passed)[: advise.FASTEST]
    assert {e.registers for e in question.evidence} == {40}


# ---- advisors that fail


@pytest.mark.parametrize("answer,message", [
    (RuntimeError("boom"), "RuntimeError: boom"), (SystemExit(2), "SystemExit: 2"), (TimeoutError(), "TimeoutError"),
    ("try tile 16", "returned str, not Advice"), (None, "returned NoneType, not Advice"), (UsageError("no server"), "no server"),
])
def test_an_advisor_that_fails_is_recorded_and_the_heuristic_order_stands(answer: object, message: str) -> None:
    ordered, _, ctx, _ = asked(answer)
    assert (ordered.steps, ordered.ranks, ordered.primary) == (PLAN.steps, PLAN.ranks, PLAN.primary)
    assert message in ordered.record.error and ordered.record.accepted == Advice()
    (failure,) = ctx.failures
    assert message in failure.message and failure.plugin == "says"
    said = {UsageError: Cause.UNAVAILABLE, str: Cause.CONTRACT, type(None): Cause.CONTRACT}
    assert failure.cause is said.get(type(answer), Cause.EXCEPTION)


def test_strict_raises_what_an_advisor_raises() -> None:
    with pytest.raises(RuntimeError, match="boom"):
        asked(RuntimeError("boom"), strict=True)
    with pytest.raises(ContractError, match="returned str, not Advice"):
        asked("a word", strict=True)


def test_a_slow_advisor_cannot_take_more_than_the_budget() -> None:
    ctx, (planned,), advisor = world(lambda q: time.sleep(0.05) or Advice(), budget_s=0.04)
    second = evolve(planned, region=evolve(planned.region, signature="second"), space=evolve(planned.space, signature="second"))
    plans = advise.run((planned, second), (), 0, ctx)
    assert [p.record.error for p in plans] == ["", "the time budget was spent on earlier answers"]
    assert len(advisor.questions) == 1 and 0 < advisor.questions[0].budget_s <= 0.04
    assert [s.schedule for s in plans[1].steps] == [s.schedule for s in plans[0].steps]


def test_an_unknown_advisor_is_named_with_those_installed() -> None:
    with pytest.raises(UsageError, match="unknown advisor 'oracle'; installed: says"):
        ctx, plans, _ = world()
        advise.run(plans, (), 0, evolve(ctx, config=Config(advisor="oracle")))


def test_refused_items_are_logged_and_reported_with_their_rules(caplog: pytest.LogCaptureFixture) -> None:
    ctx, plans, _ = world(Advice(order=("cublas/cublas",), cover_order=(77,)))
    events = []
    with caplog.at_level("INFO", logger="agentcompile_core"):
        advise.run(plans, (), 0, ctx.watched(events.append))
    assert events == [AdviceGiven(region=plans[0].region.name, advisor="says", refused=("A1 cublas/cublas", "A6 77"))]
    assert "refused: A1 cublas/cublas" in caplog.text and "refused: A6 77" in caplog.text
