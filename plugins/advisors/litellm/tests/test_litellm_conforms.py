"""The litellm advisor passes the kit for advisors, where a model answers with names of the question."""

import json
from typing import Any

import agentcompile_advisor_litellm
import pytest
from agentcompile_advisor_litellm import LiteLLMAdvisor, Settings

from agentcompile_core.plugin_api import Question
from agentcompile_core.testing.advisor_conformance import AdvisorConformance


def answer(question: Question, settings: Any) -> tuple[str, int]:
    """What a well-behaved model says."""
    return json.dumps({"order": list(dict.fromkeys(step.implementation for step in question.space.steps))}), 12


class TestLiteLLM(AdvisorConformance):
    advisor = LiteLLMAdvisor(Settings(model="stub/stub"))

    @pytest.fixture(autouse=True)
    def _stub(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(agentcompile_advisor_litellm, "ask", answer)
