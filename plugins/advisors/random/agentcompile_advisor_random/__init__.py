"""Random advice inside the space: a control. The same question and seed give the same advice."""

import random
from collections.abc import Iterable

from agentcompile_core.plugin_api import Advice, Advisor, Hint, Question, hookimpl, question_key


class RandomAdvisor(Advisor):
    """Shuffles implementations, covers and the values of every parameter."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def advise(self, question: Question) -> Advice:
        """Draw an order and hints; seeded by the question, so that a run can be repeated."""
        rng = random.Random(f"{self._seed}:{question_key(question)}")
        names = list(dict.fromkeys(step.implementation for step in question.space.steps))
        ranks = [cover.rank for cover in question.space.covers]
        rng.shuffle(names)
        rng.shuffle(ranks)
        hints = []
        for step in question.space.steps:
            for parameter in step.space.parameters:
                values = list(parameter.values)
                rng.shuffle(values)
                hints.append(Hint(match_id=step.match_id, implementation=step.implementation, parameter=parameter.name,
                                  values=tuple(values)))
        return Advice(order=tuple(names), cover_order=tuple(ranks), hints=tuple(hints))


@hookimpl
def agentcompile_advisors() -> Iterable[Advisor]:
    """Offer ``random``."""
    return (RandomAdvisor(),)
