"""Advice: whatever an advisor does, it costs its deadline at most, is named, and the planner's order stands."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import evolve
from test_hostile_advice import CANARY, JUNK, RAISED, endless, forever

from agentcompile_core.ir import serial
from agentcompile_core.ir.advice import Advice, Hint
from agentcompile_core.plugin.advice_json import read_answer
from agentcompile_core.plugin.interfaces import Advisor
from agentcompile_core.stages.advise import asking
from agentcompile_core.store import Store

from . import cheap
from .registry import add, fault
from .seen import right, told

AREA, KEPT = "advice", "the planner's order stood, the program is right"


class Does(Advisor):
    """Answers with what a function of the question returns."""

    name = "does"

    def __init__(self, what: Callable[[Any], Any]) -> None:
        self.what = what

    def advise(self, question: Any) -> Any:
        """What the function says."""
        return self.what(question)


def _compiled(folder: Path, what: Callable[[Any], Any], budget_s: float = 60.0) -> Any:
    grace, asking.GRACE_S = asking.GRACE_S, 0.1
    try:
        made = cheap.compiled(cheap.module(folder), Store(folder / "store"), workers=cheap.HERE, advisor="does", budget_s=budget_s,
                              family=cheap.Family("honest", "wrong"), extra=(("acme", cheap.offers(advisors=Does(what))),))
    finally:
        asking.GRACE_S = grace
    right(made)
    assert made.statistics["selected"] == 1
    return made


def _raises(exc: BaseException) -> Any:
    def what(question: Any) -> Any:
        raise exc

    return lambda folder: told(_compiled(folder, what), type(exc).__name__, folder)


for _exc in RAISED[:6]:
    _kind = type(_exc).__name__
    add(AREA, f"an advisor that raises {_kind}", f"advise() raises {_kind}", _raises(_exc), KEPT)
ENDLESS = {"loops": forever, "hangs": lambda q: threading.Event().wait(3600)}
for _name, _what in ENDLESS.items():
    add(AREA, f"an advisor that {_name}", f"advise() {_name}",
        lambda folder, what=_what: told(_compiled(folder, what, 4.0), "did not answer within"), KEPT)


def _junk(answer: Any, made_by: Any = None) -> Any:
    def run(folder: Path) -> str:
        made = _compiled(folder, made_by or (lambda q: answer))
        (record,) = made.compilation.advice
        assert record.error or record.rejected, "nothing was refused"
        assert len(serial.dumps(record)) < 50_000
        if record.error:
            return record.error
        return f"{len(record.rejected)} items refused, the first by rule {record.rejected[0].rule}: {record.rejected[0].item}"

    return run


ANSWERS = {"nothing": 0, "a number": 1, "a text": 2, "a dictionary": 5, "a million letters in a hint": 8, "unhashable items": 12}
for _name, _index in ANSWERS.items():
    add(AREA, f"an advisor that answers {_name}", f"advise() returns {_name}", _junk(JUNK[_index]), KEPT)
add(AREA, "an advisor that answers without end", "advise() answers with an order that has no end",
    _junk(None, lambda q: Advice(order=endless())), KEPT)  # type: ignore[arg-type]
OUTSIDE = Advice(order=("acme/magic",), cover_order=(99,), hints=(Hint(match_id="m", implementation="i", parameter="p", values=(1,)),))
add(AREA, "advice outside the space", "an order, a hint and a cover that the space does not have", _junk(OUTSIDE), KEPT)


@fault(AREA, "advise() overwrites the space, the summary and the budget of its question", KEPT)
def _an_advisor_that_changes_its_question(folder: Path) -> str:
    def spoil(question: Any) -> Advice:
        object.__setattr__(question.space, "steps", ())
        object.__setattr__(question, "budget_plans", -1)
        return Advice()

    made = _compiled(folder, spoil)
    assert not made.compilation.failures and made.compilation.spaces[0].steps
    return f"it changed its copy; {made.statistics['evaluated']} candidates were evaluated as without it"


@fault(AREA, "an advisor's error repeats a key of the environment", "the key is in no record, failure or bundle")
def _a_key_that_comes_back(folder: Path) -> str:
    import os

    os.environ["SOME_PROVIDER_API_KEY"] = CANARY
    try:
        def what(question: Any) -> Any:
            raise ValueError(f"account of {CANARY}")

        made = _compiled(folder, what)
        said = told(made, "account of")
        files = b"".join(path.read_bytes() for path in made.save(folder / "bundle").rglob("*") if path.is_file())
        kept = b"".join(path.read_bytes() for path in (folder / "store").rglob("*") if path.is_file())
        assert CANARY.encode() not in files + kept + said.encode() and "[secret]" in said
        return said
    finally:
        del os.environ["SOME_PROVIDER_API_KEY"]


TEXTS = {"an answer that is no JSON": "make it fast",
         "an answer with a key twice": '{"order": [], "order": []}',
         "an answer of a million brackets": "[" * 10**6,
         "an answer with NaN": '{"hints": [NaN]}', "an answer of megabytes": " " * (8 << 20)}


def _text(text: str) -> Any:
    def run(folder: Path) -> str:
        made = _compiled(folder, lambda q: read_answer(text, q))
        return told(made, "does", folder)

    return run


for _name, _answer in TEXTS.items():
    add(AREA, _name, f"a service answers with {_name.removeprefix('an answer ')}", _text(_answer), KEPT)


@fault(AREA, "advice names risks while the fixed cases stay as they are", "no fixed case was removed")
def _advice_that_would_remove_checks(folder: Path) -> str:
    from agentcompile_core.ir.advice import Risk

    def checks(made: Any) -> set[str]:
        return {c.name for r in made.compilation.records if r.verdict for c in r.verdict.checks}

    plain = checks(_compiled(folder, lambda q: Advice()))
    (folder / "other").mkdir()
    risky = checks(_compiled(folder / "other", lambda q: evolve(Advice(), risks=tuple(Risk))))
    assert plain <= risky, plain - risky
    return f"{len(plain)} fixed checks with and without advice, {len(risky - plain)} more with every risk named"
