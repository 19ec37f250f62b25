"""The replay advisor passes the kit for advisors on a file that answers its first question and no other."""

import json
from pathlib import Path

import pytest
from agentcompile_advisor_replay import ENVIRONMENT, ReplayAdvisor

from agentcompile_core.plugin_api import question_key
from agentcompile_core.testing.advisor_conformance import AdvisorConformance

FIRST = AdvisorConformance.questions[0]
ANSWER = {"order": [FIRST.space.steps[1].implementation],
          "hints": [{"match": "m0", "implementation": FIRST.space.steps[0].implementation, "parameter": "tile", "values": [16]}]}


class TestReplay(AdvisorConformance):
    advisor = ReplayAdvisor()

    @pytest.fixture(autouse=True)
    def _recorded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "advice.json"
        path.write_text(json.dumps({"schema": 1, "answers": {question_key(FIRST): ANSWER}}))
        monkeypatch.setenv(ENVIRONMENT, str(path))

    def test_the_recorded_answer_is_given(self) -> None:
        assert len(self.advisor.advise(FIRST).hints) == 1
