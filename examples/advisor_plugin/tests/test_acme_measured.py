"""The kit of the core, applied to this advisor, and what it says once something was measured."""

from acme_measured import MeasuredAdvisor

from agentcompile_core.testing.advisor_conformance import AdvisorConformance
from agentcompile_core.testing.questions import question


class TestMeasured(AdvisorConformance):
    advisor = MeasuredAdvisor()


def test_it_repeats_what_was_fast() -> None:
    asked = question(matches=1, families=2, round_number=1)
    advice = MeasuredAdvisor().advise(asked)
    fastest = min((e for e in asked.evidence if e.us), key=lambda e: e.us)
    assert advice.order[0] == fastest.implementation
    assert advice.hints[0].values[0] == dict(fastest.schedule)[advice.hints[0].parameter]
    assert MeasuredAdvisor().advise(question()).order == ()
