"""Texts of the plugins in test_seen_cases.py; the module that they serve adds 100 numbers."""

NAMES = """
import os
from attrs import evolve, frozen
from agentcompile_core.testing import doubles

try:
    from agentcompile_core.plugin_api import (
        Advice, Advisor, Cause, Implementation, Origin, Outcome, Parameter, Reject, Schedule, ScheduleSpace, Target, Verdict, hookimpl)
    BEFORE = False
except ImportError:  # before plugins had one door
    from agentcompile_core.advice import Advice
    from agentcompile_core.errors import Cause, Reject
    from agentcompile_core.hookspecs import hookimpl
    from agentcompile_core.interfaces import Advisor, Implementation
    from agentcompile_core.plan import Origin, Parameter, Schedule, ScheduleSpace
    from agentcompile_core.target import Target
    from agentcompile_core.verdict import Outcome, Verdict
    BEFORE = True


class Timed(doubles.FakeBackend):
    name = "emulation"
    emulated = True


class Untimed(doubles.NoTimeBackend):
    name = "emulation"
    emulated = True
    window = 1  # one kernel is judged before the next one is sent


class Honest(doubles.FakeFamily):
    times = (5.0,)

    def space(self, match, target):
        parameters = (Parameter(name="behave", values=("honest",)), Parameter(name="us", values=self.times))
        return ScheduleSpace(parameters=parameters, points=tuple(Schedule({"behave": "honest", "us": us}) for us in self.times))


def offer(*found):
    return hookimpl(lambda: found)
"""
LONG = ("the table of tile sizes in the folder of this plugin names a size of 48 for the count 100, which no kernel of this family was "
        "made for: run its tuning script again for this count, or take one of the sizes 16, 32 and 64, which always work; nothing else "
        "is wrong, and all other matches of this family are served as before, so the rest of the model is not slower than yesterday")
SAID = '''
@frozen
class Settings:
    first: tuple[str, ...] = ()
    most_us: float = 100.0


class Told(Advisor):
    name = "told"
    settings_class = Settings

    def advise(self, question):
        return Advice(order=getattr(self, "settings", Settings()).first)


class Strict(doubles.SimpleValidator):
    name = "strict"
    settings_class = Settings

    def controls(self, backend):
        return (doubles.fake_trial("honest", 1e-3),), (doubles.fake_trial("honest", 1e9),)

    def check(self, trial, run):
        most_us = getattr(self, "settings", Settings()).most_us
        slow = float(trial.source.code.split("us=")[1]) > most_us
        return Verdict(validator=self.name, outcome=Outcome.FAIL if slow else Outcome.PASS, cause=Cause.TOLERANCE if slow else None,
                       message=f"slower than {most_us} us" if slow else "")


class Quick(Honest):
    name = "quick"
    times = (5.0, 5.5)


class Slow(Honest):
    name = "slow"
    times = (6.5,)


class Lost(Honest):
    name = "lost"

    def accepts(self, match, target):
        raise KeyError(LONG)


class Shy(Honest):
    name = "shy"

    def accepts(self, match, target):
        return Reject("it adds on Sundays only")


agentcompile_backends = offer(Timed())
agentcompile_validators = offer(doubles.SimpleValidator(), Strict())
agentcompile_advisors = offer(Told())
agentcompile_template_families = offer(Quick(), Slow(), Lost(), Shy())
'''.replace("LONG", repr(LONG))
FAMILY = '''
class Late(Honest):
    name = "late"
    times = (6.5,)


agentcompile_template_families = offer(Late())
'''
UNTIMED = '''
class First(Honest):
    name = "first"
    times = (5.0, 5.25)


agentcompile_backends = offer(Untimed())
agentcompile_validators = offer(doubles.SimpleValidator())
agentcompile_template_families = offer(First())
'''
ADDING = '''
class Add(Implementation):
    name = "add"
    version = 1
    origin = Origin.HANDWRITTEN
    capturable = False

    def accepts(self, match, target):
        return True if match.kind == "elementwise" else Reject("it adds")

    def space(self, match, target):
        return ScheduleSpace(parameters=(), points=(Schedule({}),))

    def bind(self, match, schedule, target):
        import torch

        return lambda in0, in1, out: torch.add(in0, in1, out=out)


agentcompile_backends = offer(Untimed())
agentcompile_validators = offer(doubles.SimpleValidator())
agentcompile_implementations = offer(Add())
'''
CAPTURING = '''
class Quick(Honest):
    name = "quick"
    times = (5.0, 5.5)


class Capturing(Timed):
    captures = "SEEN_PARENT" in os.environ  # the worker runs on the CPU, where nothing is captured
    device = "cuda" if captures and BEFORE else "cpu"


agentcompile_backends = offer(Capturing())
agentcompile_validators = offer(doubles.SimpleValidator())
agentcompile_template_families = offer(Quick())
'''
HARDWARE = '''
class Words(Honest):
    name = "in_words"
    language = "words"

    def lower(self, match, schedule, target):
        return evolve(super().lower(match, schedule, target), language="words")


class Acme(doubles.FakeBackend):
    name = "acme"
    languages = ("words",)

    def live_target(self):
        return acme_one()


def acme_one():
    return Target(name="acme_one", arch="acme-v1", backend="acme", languages=("words",))


@hookimpl
def agentcompile_targets():
    return [acme_one()]


agentcompile_backends = offer(Acme())
agentcompile_validators = offer(doubles.SimpleValidator())
agentcompile_template_families = offer(Words())
'''
