"""An advisor from outside: nearest to the memory floor first, and the parameter values of the fastest schedules first."""

from collections.abc import Iterable

from attrs import field, frozen

from agentcompile_core.plugin_api import Advice, Advisor, Evidence, Hint, Parameter, Question, Risk, StepSpace, hookimpl


@frozen(kw_only=True)
class Settings:
    """``[plugin.measured]``."""

    long: int = field(default=1 << 16, metadata={"doc": "FLOPs per byte of a match beyond which sums deserve another look"})


class MeasuredAdvisor(Advisor):
    """Silent in the first round, where nothing has been measured; then it repeats what was seen."""

    name = "measured"
    settings_class = Settings

    def advise(self, question: Question) -> Advice:
        """Order and hints from ``question.evidence``; nothing here reads a clock, so equal questions get equal answers."""
        timed = [e for e in question.evidence if e.us > 0.0]
        known = dict.fromkeys(step.implementation for step in question.space.steps)
        best = {name: min((slowness(e) for e in timed if e.implementation == name), default=None) for name in known}
        order = tuple(sorted((name for name in best if best[name] is not None), key=lambda name: best[name]))
        hints = tuple(hint for step in question.space.steps for hint in hints_of(step, timed))
        risky = any(match.flops > self.settings.long * max(1, match.bytes) for match in question.summary.matches)
        return Advice(order=order, hints=hints, risks=(Risk.LONG_REDUCTION,) if risky else ())


def slowness(seen: Evidence) -> float:
    """Times the memory floor; plain microseconds where no floor is known."""
    return seen.us / seen.floor_us if seen.floor_us > 0.0 else seen.us


def hints_of(step: StepSpace, timed: Iterable[Evidence]) -> Iterable[Hint]:
    """For each parameter of one step: its values, those of the fastest schedules first."""
    mine = sorted((e for e in timed if (e.match_id, e.implementation) == (step.match_id, step.implementation)), key=slowness)
    for parameter in step.space.parameters if mine else ():
        yield Hint(match_id=step.match_id, implementation=step.implementation, parameter=parameter.name,
                   values=ranked(parameter, [dict(e.schedule).get(parameter.name) for e in mine]))


def ranked(parameter: Parameter, seen: list[object]) -> tuple:
    """All values of ``parameter``, those that were seen to be fast first."""
    return tuple(dict.fromkeys((*(value for value in seen if value in parameter.values), *parameter.values)))


@hookimpl
def agentcompile_advisors() -> list[Advisor]:
    """What this distribution offers."""
    return [MeasuredAdvisor()]
