"""The test that every advisor passes: subclass, say what it is, run pytest.

    class TestMine(AdvisorConformance):
        advisor = MyAdvisor()
        deterministic = True
"""

import time
from collections.abc import Sequence
from copy import deepcopy
from typing import ClassVar

from attrs import evolve

from ..ir import serial
from ..ir.advice import Advice, Question
from ..plugin.interfaces import Advisor
from ..stages.advise.advice_check import screen
from .demands import demand, demand_identity
from .questions import question

SLACK_S = 1.0  # beyond the budget of a question: the machine may be busy


class AdvisorConformance:
    """Subclass as ``class Test...``: ``advisor``; ``deterministic`` if equal questions get equal answers; more ``questions``."""

    advisor: ClassVar[Advisor]
    deterministic: ClassVar[bool] = True
    questions: ClassVar[Sequence[Question]] = (question(), question(1, 1, 1), question(4, 3, 4, round_number=1))
    budget_s: ClassVar[float] = 2.0

    def test_identity(self) -> None:
        """It is an Advisor with a name and a version."""
        demand_identity(self.advisor, Advisor)

    def test_everything_it_says_lies_inside_the_space(self) -> None:
        """No item of an answer is refused: every name and value occurs in the question, once, and has its type."""
        for asked in self.questions:
            _, refused = screen(self._ask(asked), asked)
            said = "; ".join(f"{item.rule} {item.item}" for item in refused)
            demand(not refused, f"{_name(asked)}: these items lie outside the space: {said}")

    def test_an_empty_space_gets_an_answer(self) -> None:
        """A region that nothing can serve is no error, and there is nothing to say about it."""
        asked = question(0, 0)
        answer = self._ask(asked)
        demand(not (answer.order or answer.hints or answer.cover_order), f"the space is empty, but the answer names {answer}")

    def test_it_answers_within_its_budget(self) -> None:
        """``budget_s`` of the question is kept, also where it is short."""
        for asked in self.questions:
            for budget_s in (self.budget_s, 0.1):
                began = time.monotonic()
                self._ask(evolve(asked, budget_s=budget_s), may_raise=True)
                taken = time.monotonic() - began
                demand(taken <= budget_s + SLACK_S, f"{_name(asked)}: it took {taken:.1f} s of a budget of {budget_s:.1f} s")

    def test_equal_questions_get_equal_answers(self) -> None:
        """If it says so: in any order, whatever was asked before."""
        if not self.deterministic:
            return
        first = [self._ask(asked) for asked in self.questions]
        second = [self._ask(asked) for asked in reversed(self.questions)][::-1]
        for asked, one, other in zip(self.questions, first, second, strict=True):
            demand(one == other, f"{_name(asked)}: it answers differently the second time, although it is said to be deterministic")

    def test_the_question_is_left_as_it_was(self) -> None:
        """Questions are shared: an advisor may not change them, frozen or not."""
        for asked in self.questions:
            given, before = deepcopy(asked), serial.digest(asked)
            self.advisor.advise(given)
            demand(serial.digest(given) == before, f"{_name(asked)}: advise() changed the question")

    # ----

    def _ask(self, asked: Question, may_raise: bool = False) -> Advice:
        try:
            answer = self.advisor.advise(deepcopy(asked))  # one that changes it does not fool the tests after this one
        except Exception as exc:
            if may_raise:
                return Advice()
            raise AssertionError(f"{_name(asked)}: advise() raised {type(exc).__name__}: {exc}") from exc
        demand(isinstance(answer, Advice), f"{_name(asked)}: advise() returned {type(answer).__name__}, not Advice")
        return answer


def _name(asked: Question) -> str:
    return f"question of round {asked.round} with {len(asked.space.steps)} steps"
