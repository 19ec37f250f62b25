"""The random advisor passes the kit for advisors."""

from agentcompile_advisor_random import RandomAdvisor

from agentcompile_core.testing.advisor_conformance import AdvisorConformance


class TestRandom(AdvisorConformance):
    advisor = RandomAdvisor()
