"""Advisors that hang, loop, raise, lie or change what they are given: each costs its deadline and nothing else."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from advice_cases import QUESTION, asked, world
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.errors import Cause
from agentcompile_core.ir import serial
from agentcompile_core.ir.advice import Advice, Diagnosis, Hint, Question, RejectedItem, Risk
from agentcompile_core.plugin.interfaces import Advisor
from agentcompile_core.plugin.secrets import holds_secret, scrubbed, secret_values
from agentcompile_core.stages import advise
from agentcompile_core.stages.advise import asking

CANARY = "sk-canary-5up3rs3cr3t"


class Does(Advisor):
    """Answers with what a function of the question returns."""

    name = "says"

    def __init__(self, what: Callable[[Question], Any]) -> None:
        self.what, self.asked = what, 0

    def advise(self, question: Question) -> Any:
        self.asked += 1
        return self.what(question)


def test_a_question_that_pickle_cannot_copy_is_asked() -> None:
    """Values of a class that has no name anywhere, as a plugin that is made on the way may bring them."""
    class Text(str):
        pass

    given: list[Question] = []
    question = evolve(QUESTION, target=Text("h200"))
    asking.ask(Does(lambda asked: given.append(asked) or Advice()), question)  # type: ignore[func-returns-value]
    assert given[0] == question and given[0] is not question and type(given[0].target) is Text


@pytest.fixture(autouse=True)
def _survives(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(asking, "GRACE_S", 0.1)
    monkeypatch.setenv("SOME_PROVIDER_API_KEY", CANARY)
    yield


def run(what: Callable[[Question], Any], budget_s: float = 60.0) -> tuple[Any, Any, Does, float]:
    """The plan of one round, its context, the advisor, and the seconds that it took."""
    ctx, plans, says = world(budget_s=budget_s)
    subject = Does(what)
    place = next(key for key, value in ctx.catalog.advisors.items() if value is says)
    ctx.catalog.advisors[place] = subject
    ctx.catalog.strict = False
    before, began = serial.dumps(list(plans)), time.monotonic()
    ordered = advise.run(plans, (), 0, ctx)
    assert serial.dumps(list(plans)) == before, "what an advisor does to its question stays in its copy"
    return ordered, ctx, subject, time.monotonic() - began


def raises(exc: BaseException) -> Callable[[Question], Any]:
    def what(question: Question) -> Any:
        raise exc

    return what


def forever(question: Question) -> Any:
    while True:
        pass


def endless() -> Iterator[str]:
    while True:
        yield "many/many"


class Unspeakable(BaseException):
    def __str__(self) -> str:
        raise SystemExit("not even this")


RAISED = [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), Unspeakable(), RecursionError("deep"), MemoryError(), UnicodeError("x"),
          StopIteration(), ValueError("\x1b[2J" * 1000)]


@pytest.mark.parametrize("exc", RAISED, ids=lambda e: type(e).__name__)
def test_whatever_an_advisor_raises_is_recorded_and_the_heuristic_order_stands(exc: BaseException) -> None:
    plain, *_ = asked(Advice())
    ordered, ctx, _, _ = run(raises(exc))
    assert [p.steps for p in ordered] == [plain.steps]
    assert ordered[0].record.error.startswith(type(exc).__name__) and len(ordered[0].record.error) < 3000
    assert [f.cause for f in ctx.failures] == [Cause.EXCEPTION]


@pytest.mark.parametrize("what", [forever, lambda q: threading.Event().wait(3600)], ids=["endless", "hanging"])
def test_an_advisor_that_does_not_answer_costs_its_deadline(what: Callable[[Question], Any]) -> None:
    plain, *_ = asked(Advice())
    ordered, ctx, _, seconds = run(what, budget_s=2.0)
    assert [p.steps for p in ordered] == [plain.steps] and seconds < 4.0
    assert "did not answer within" in ordered[0].record.error and [f.cause for f in ctx.failures] == [Cause.TIMEOUT]


def test_one_that_is_still_busy_is_not_asked_again_and_a_loop_is_ended() -> None:
    release = threading.Event()
    hanging = Does(lambda q: release.wait(60) and Advice())
    question = evolve(QUESTION, budget_s=0.05)
    for message in ("did not answer", "has not answered an earlier question"):
        with pytest.raises(asking.Late, match=message):
            asking.ask(hanging, question)
    assert hanging.asked == 1
    release.set()
    looping = Does(forever)
    with pytest.raises(asking.Late):
        asking.ask(looping, question)
    thread = asking._busy[id(looping)]
    thread.join(10.0)
    assert not thread.is_alive()


def test_an_advisor_gets_a_copy() -> None:
    def spoil(question: Question) -> Advice:
        object.__setattr__(question.space, "steps", ())
        object.__setattr__(question.summary, "label", "spoilt")
        object.__setattr__(question, "budget_plans", -1)
        return Advice()

    plain, *_ = asked(Advice())
    ordered, ctx, _, _ = run(spoil)
    assert [p.steps for p in ordered] == [plain.steps] and not ctx.failures


JUNK = [None, 1, "text", object(), Advice, {"order": []}, Advice(order=(1, None, object())), Advice(hints=(None, {"x": 1})),
        Advice(hints=(Hint(match_id="x" * 10**6, implementation="y", parameter="z", values=(object(),)),)),
        Advice(refused=("not an item", RejectedItem(item="x", rule=object()))), Advice(tokens="many"), Advice(tokens=-5),
        Advice(order=[["unhashable"]]), Advice(cover_order=range(10**6)), Advice(order=tuple("many/many" for _ in range(10**5)))]


class Silent:
    """Neither says what it is nor is comparable."""

    def __repr__(self) -> str:
        raise SystemExit("no")

    def __eq__(self, other: object) -> bool:
        raise ValueError("no")

    __hash__ = None  # type: ignore[assignment]


FIELDS = ("order", "cover_order", "hints", "risks", "diagnoses", "refused")
SPOILT = [None, 7, "text", object(), Silent(), {"x": 1}, range(10**9), endless(), (Silent(), None), [Silent()], (b"x", 1.5, ()),
          (Hint(match_id=[], implementation=Silent(), parameter=None, values=7), Hint(match_id="m", implementation="i", parameter="p",
                                                                                     values=(Silent(),)))]


@settings(derandomize=True, database=None, deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(field=st.sampled_from(FIELDS), junk=st.sampled_from(SPOILT))
def test_what_is_wrong_with_one_field_costs_that_field_alone(field: str, junk: object) -> None:
    names = tuple(dict.fromkeys(step.implementation for step in QUESTION.space.steps))
    sound = {"order": names, "cover_order": tuple(cover.rank for cover in QUESTION.space.covers),
             "risks": (Risk.RAGGED_TAIL,), "diagnoses": (Diagnosis.AT_THE_FLOOR,),
             "label": str(QUESTION.labels[0])}
    whole, _, _ = asking.ask(Does(lambda q: Advice(**sound)), QUESTION)
    assert all(getattr(whole, name) == value for name, value in sound.items())
    found, refused, _ = asking.ask(Does(lambda q: Advice(**{**sound, field: junk})), QUESTION)
    for name in sound:
        assert getattr(found, name) == (() if name == field else getattr(whole, name)), name
    assert field == "refused" or any(item.rule == "A8" for item in refused) or isinstance(junk, tuple | list)


@pytest.mark.parametrize("answer", JUNK, ids=range(len(JUNK)))
def test_an_answer_of_any_form_leaves_a_record_that_can_be_written(answer: object) -> None:
    plain, *_ = asked(Advice())
    ordered, _, _, _ = run(lambda q: answer)
    assert set(ordered[0].steps) == set(plain.steps)
    assert len(serial.dumps(ordered[0].record)) < 50_000


def test_no_key_of_the_environment_reaches_a_record_a_failure_or_a_log(caplog: pytest.LogCaptureFixture) -> None:
    told = []
    for what in (raises(ValueError(f"account of {CANARY}")), lambda q: Advice(order=(CANARY, f"x{CANARY}y")),
                 lambda q: Advice(refused=(RejectedItem(item=CANARY, rule="J1"),))):
        with caplog.at_level("INFO"):
            ordered, ctx, _, _ = run(what)
        told += [serial.dumps(ordered[0].record), repr(list(ctx.failures))]
    assert CANARY not in "".join(told) + caplog.text and "[secret]" in "".join(told)


def test_secrets_are_the_long_values_of_variables_with_telling_names() -> None:
    environ = {"A_KEY": "0123456789", "MY_TOKEN": "0123456789abc", "db_password": "hunter2hunter2", "SECRET": "short",
    "HOME": "/home/someone"}
    assert secret_values(environ) == ("hunter2hunter2", "0123456789abc", "0123456789")
    assert scrubbed("x0123456789abcx 0123456789", environ) == "x[secret]x [secret]"
    assert holds_secret("my hunter2hunter2", environ) and not holds_secret("/home/someone short", environ)
