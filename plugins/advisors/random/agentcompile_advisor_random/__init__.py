"""Random advice inside the space: a control. The same question and seed give the same advice."""

import random
from collections.abc import Iterable

from attrs import field, frozen

from agentcompile_core.plugin_api import Advice, Advisor, Hint, Question, hookimpl, question_key


@frozen(kw_only=True)
class Settings:
    """``[plugin.random]``."""

    seed: int = field(default=0, metadata={"doc": "another seed shuffles differently"})


class RandomAdvisor(Advisor):
    """Shuffles implementations, covers and the values of every parameter."""

    name = "random"
    settings_class = Settings

    def __init__(self, settings: Settings | None = None) -> None:
        if settings is not None:
            self.configure(settings)

    def advise(self, question: Question) -> Advice:
        """Draw an order and hints; seeded by the question, so that a run can be repeated."""
        rng = random.Random(f"{self.settings.seed}:{question_key(question)}")
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
