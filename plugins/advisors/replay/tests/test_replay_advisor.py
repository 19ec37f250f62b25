"""The replay advisor: recorded answers by the key of the question; everything else is refused clearly or left alone."""

import json
from pathlib import Path

import pytest
from agentcompile_advisor_replay import ENVIRONMENT, ReplayAdvisor, Settings
from attrs import evolve

from agentcompile_core.ir.plan import Cover, Fusion, PlanSpace
from agentcompile_core.plugin_api import (
    Advice,
    Evidence,
    Origin,
    Parameter,
    Question,
    RegionSummary,
    Schedule,
    ScheduleSpace,
    SemanticLabel,
    StepSpace,
    UsageError,
    question_key,
)

POINTS = tuple(Schedule({"tile": tile}) for tile in (16, 32, 64))
STEP = StepSpace(match_id="linear:a+1:a", implementation="gemv/gemv", origin=Origin.GENERATED, version=1,
                 space=ScheduleSpace(parameters=(Parameter(name="tile", values=(16, 32, 64)),), points=POINTS))
SPACE = PlanSpace(signature="s", covers=(Cover(matches=("linear:a+1:a",), fusion=Fusion.NONE, rank=0),), steps=(STEP,))
SUMMARY = RegionSummary(signature="s", label=SemanticLabel.GEMV, operators=(("linear", 1),), instances=2, matches=(),
                        dominant=SemanticLabel.GEMV)
QUESTION = Question(summary=SUMMARY, space=SPACE, target="h200")
ANSWER = {"order": ["gemv/gemv"], "hints": [{"match": "m0", "implementation": "gemv/gemv", "parameter": "tile", "values": [64]}]}


def recorded(path: Path, answers: dict) -> Path:
    path.write_text(json.dumps({"schema": 1, "answers": answers}))
    return path


def test_a_recorded_question_gets_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recorded(tmp_path / "advice.json", {question_key(QUESTION): ANSWER})
    advice = ReplayAdvisor(Settings(file=path)).advise(QUESTION)
    assert advice.order == ("gemv/gemv",) and advice.hints[0].values == (64,) and advice.hints[0].match_id == "linear:a+1:a"
    monkeypatch.setenv(ENVIRONMENT, str(path))
    assert ReplayAdvisor().advise(QUESTION) == advice


def test_measured_facts_and_budgets_do_not_change_the_question(tmp_path: Path) -> None:
    subject = ReplayAdvisor(Settings(file=recorded(tmp_path / "advice.json", {question_key(QUESTION): ANSWER})))
    fact = Evidence(match_id="linear:a+1:a", implementation="gemv/gemv", schedule=(("tile", 16),), verdict="pass", us=3.0)
    assert subject.advise(evolve(QUESTION, evidence=(fact,), budget_s=3.0, budget_plans=9)).order == ("gemv/gemv",)


@pytest.mark.parametrize("change", [{"round": 1}, {"target": "a100"}, {"space": evolve(SPACE, covers=())},
                                    {"summary": evolve(SUMMARY, instances=3)}], ids=lambda change: next(iter(change)))
def test_another_question_gets_no_advice(tmp_path: Path, change: dict) -> None:
    subject = ReplayAdvisor(Settings(file=recorded(tmp_path / "advice.json", {question_key(QUESTION): ANSWER})))
    assert subject.advise(evolve(QUESTION, **change)) == Advice()


def test_recorded_answers_are_read_as_strictly_as_live_ones(tmp_path: Path) -> None:
    answer = {**ANSWER, "code": "x", "risks": ["everything"]}
    advice = ReplayAdvisor(Settings(file=recorded(tmp_path / "advice.json", {question_key(QUESTION): answer}))).advise(QUESTION)
    assert [r.rule for r in advice.refused] == ["J1", "J3"] and advice.order == ("gemv/gemv",)
    with pytest.raises(UsageError, match="must be a JSON object, got str"):
        ReplayAdvisor(Settings(file=recorded(tmp_path / "advice.json", {question_key(QUESTION): "try tile 64"}))).advise(QUESTION)


@pytest.mark.parametrize("text,message", [
    ("[]", "is not a file of recorded advice"), ('{"schema": 1}', "is not a file of recorded advice"),
    ('{"schema": 2, "answers": {}}', "expected an object with schema 1 and answers"), ("no json", "is not a file of recorded advice"),
    ('{"schema": 1, "answers": {"a": {}, "a": {}}}', "duplicate key"),
])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "advice.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        ReplayAdvisor(Settings(file=path)).advise(QUESTION)
    assert str(path) in str(caught.value)


def test_a_file_that_is_missing_binary_or_unnamed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"cannot read recorded advice from .*none\.json: No such file"):
        ReplayAdvisor(Settings(file=tmp_path / "none.json")).advise(QUESTION)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not a file of recorded advice"):
        ReplayAdvisor(Settings(file=tmp_path / "binary")).advise(QUESTION)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(UsageError, match=f"\\[plugin.replay\\] of agentcompile.toml, or in {ENVIRONMENT}"):
        ReplayAdvisor().advise(QUESTION)
