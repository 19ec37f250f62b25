"""The litellm advisor against a stub server: what it sends, how strictly it reads, that it asks once and tells no secrets."""

import importlib.util
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import agentcompile_advisor_litellm
import pytest
from agentcompile_advisor_litellm import MODEL, RECORD, LiteLLMAdvisor, Settings
from agentcompile_cuda_kit.targets import PRESETS
from agentcompile_rules_transformers.testing import gated_case
from attrs import evolve

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.ir.plan import Cover, Fusion, PlanSpace, RegionPlan
from agentcompile_core.ir.region import Instance, Region
from agentcompile_core.plugin.catalog import Catalog
from agentcompile_core.plugin_api import (
    Advice,
    AdviceGiven,
    DType,
    Evidence,
    MatchSummary,
    Origin,
    Parameter,
    Question,
    RegionSummary,
    Risk,
    Schedule,
    ScheduleSpace,
    SemanticLabel,
    StepSpace,
    UsageError,
    answer_schema,
    question_key,
)
from agentcompile_core.stages import advise
from agentcompile_core.stages.advise.advice_check import screen
from agentcompile_core.store import Store

if importlib.util.find_spec("litellm") is None:
    pytest.skip("litellm is not installed", allow_module_level=True)
CANARY = "sk-canary-5up3rs3cr3t"
pair = gated_case(n=256, k=128, norm="rms", dtype=DType.F16)
MATCH = pair[0]
POINTS = tuple(Schedule({"tile": tile, "stages": 2}) for tile in (16, 32, 64))
STEP = StepSpace(match_id=MATCH.id, implementation="gemv/gemv", origin=Origin.GENERATED, version=1, space=ScheduleSpace(
    parameters=(Parameter(name="tile", values=(16, 32, 64)), Parameter(name="stages", values=(2,))), points=POINTS))
SPACE = PlanSpace(signature="secret-signature", covers=(Cover(matches=(MATCH.id,), fusion=Fusion.FULL, rank=0),), steps=(STEP,))
SUMMARY = RegionSummary(
    signature="secret-signature", label=SemanticLabel.GATED_MLP, operators=(("linear", 2), ("mul", 1)), instances=28,
    dominant=SemanticLabel.GATED_MLP, matches=(MatchSummary(
        id=MATCH.id, label=SemanticLabel.GATED_MLP, kind="linear", operators=("rms_norm", "linear", "linear", "silu", "mul"),
        shapes=((1, 1, 128), (512, 128)), dtype="float16", reduction_axis=-1, flops=131072, bytes=131840),))
QUESTION = Question(summary=SUMMARY, space=SPACE, target="h200", budget_s=30.0, budget_plans=8)
HINT = {"match": "m0", "implementation": "gemv/gemv", "parameter": "tile", "values": [64, 32]}
GOOD = {"label": "gated_mlp", "order": ["gemv/gemv"], "cover_order": [0], "hints": [HINT], "risks": ["long_reduction"], "diagnoses": []}


PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    for name in (MODEL, RECORD, "AGENTCOMPILE_LLM_API_BASE", *PROXIES, *map(str.lower, PROXIES)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    agentcompile_advisor_litellm._asker()._running()  # its start, which takes seconds, is in nobody's deadline


@pytest.fixture(scope="module", autouse=True)
def _child() -> Iterator[None]:
    yield
    agentcompile_advisor_litellm._asker().close()


def advisor(server, timeout_s: float = 20.0, **options) -> LiteLLMAdvisor:
    return LiteLLMAdvisor(Settings(model="openai/stub", api_base=server.base, timeout_s=timeout_s, **options))


def test_a_good_answer_becomes_advice_after_exactly_one_request(server) -> None:
    server.says(GOOD)
    advice = advisor(server).advise(QUESTION)
    assert advice.label == SemanticLabel.GATED_MLP and advice.order == ("gemv/gemv",) and advice.risks == (Risk.LONG_REDUCTION,)
    assert [(h.match_id, h.parameter, h.values) for h in advice.hints] == [(MATCH.id, "tile", (64, 32))]
    assert advice.tokens == 321 and advice.refused == () and len(server.requests) == 1
    assert screen(advice, QUESTION)[1] == ()


def test_the_request_carries_the_schema_and_facts_only(server) -> None:
    server.says(GOOD)
    evidence = (Evidence(match_id=MATCH.id, implementation="gemv/gemv", schedule=POINTS[0].items, verdict="pass", us=7.25, floor_us=5.0),)
    advisor(server).advise(evolve(QUESTION, evidence=evidence, round=1))
    (sent,) = server.requests
    assert sent["response_format"]["type"] == "json_schema" and sent["response_format"]["json_schema"]["schema"] == answer_schema()
    assert sent["temperature"] == 0 and sent["model"] == "stub" and not sent.get("stream")
    system, user = sent["messages"]
    question = json.loads(user["content"])
    assert (system["role"], user["role"]) == ("system", "user")
    assert question["steps"][0]["parameters"][0] == {"name": "tile", "values": [16, 32, 64]}
    assert question["evidence"][0]["us"] == 7.25 and question["target"] == "h200" and question["round"] == 1
    text = json.dumps(sent)
    for secret in (MATCH.id, *MATCH.nodes, "secret-signature", "gate.weight", CANARY, "__global__", str(Path.home()), "/"  "tmp"):
        assert secret not in text.replace("gemv/gemv", ""), secret
    assert server.keys == [f"Bearer {CANARY}"]


@pytest.mark.parametrize("answer,rules", [
    ({**GOOD, "code": "__global__ void f() {}"}, ["J1"]),
    ({**GOOD, "order": "gemv/gemv"}, ["J2"]),
    ({**GOOD, "risks": ["it may explode"]}, ["J3"]),
    ({**GOOD, "hints": [{**HINT, "match": "m9"}]}, ["J4"]),
    ({**GOOD, "order": ["cublas/cublas", "gemv/gemv"]}, ["A1"]),
    ({**GOOD, "hints": [{**HINT, "values": [128]}]}, ["A4"]),
    ({**GOOD, "hints": [{**HINT, "parameter": "warps"}]}, ["A3"]),
    ({**GOOD, "cover_order": [3]}, ["A6"]),
])
def test_items_outside_the_space_are_refused_and_logged_by_rule(server, answer: dict, rules: list[str], caplog) -> None:
    server.says(answer)
    ctx, events = context(advisor(server))
    with caplog.at_level(logging.INFO, logger="agentcompile_core"):
        (ordered,) = advise.run((RegionPlan(region=region(), summary=SUMMARY, space=SPACE),), (), 0, ctx)
    assert [r.rule for r in ordered.record.rejected] == rules and ordered.record.error == "" and ordered.record.tokens == 321
    assert f"refused: {rules[0]} " in caplog.text and events[0].refused[0].startswith(f"{rules[0]} ")
    assert {s.schedule for s in ordered.steps} <= set(POINTS)


def region() -> Region:
    return Region(name="layer", signature=SPACE.signature, graph=pair[1], instances=(Instance(nodes=(), values=()),), matches=(MATCH,))


def context(subject: LiteLLMAdvisor, strict: bool = False) -> tuple[Context, list[AdviceGiven]]:
    catalog, events = Catalog(strict=strict), []
    catalog.advisors["litellm/litellm"] = subject
    ctx = Context(catalog=catalog, target=PRESETS["h200"], config=Config(advisor="litellm", budget_s=60.0), store=Store(None))
    return ctx.watched(lambda event: events.append(event) if isinstance(event, AdviceGiven) else None), events


def broken(server, case: str) -> None:
    bodies = {"500": (500, json.dumps({"error": {"message": f"account of {CANARY} is broken"}})),
              "401": (401, json.dumps({"error": {"message": f"Incorrect API key provided: {CANARY}"}})),
              "429": (429, json.dumps({"error": {"message": f"slow down, {CANARY}"}})),
              "html": (200, f"<html>{CANARY}</html>"), "empty": (200, ""), "no choices": (200, '{"id": "1", "choices": []}')}
    texts = {"prose": "I would try tile 64.", "fenced": "```json\n{}\n```", "list": "[]", "nothing": "",
             "duplicate": '{"order": [], "order": ["gemv/gemv"]}', "nan": '{"cover_order": [NaN]}', "deep": "[" * 200}
    if case in bodies:
        server.reply = lambda: bodies[case]
    elif case in texts:
        server.says(texts[case])
    else:
        server.reply = lambda: 5.0


CASES = ("500", "401", "429", "html", "empty", "no choices", "prose", "fenced", "list", "nothing", "duplicate", "nan", "deep")


@pytest.mark.parametrize("case", CASES)
def test_whatever_goes_wrong_is_one_refusal_after_one_request_and_tells_no_secret(server, case: str, caplog, capfd) -> None:
    broken(server, case)
    with caplog.at_level(logging.INFO), pytest.raises(UsageError) as caught:
        advisor(server, timeout_s=20.0).advise(QUESTION)
    assert len(server.requests) == 1
    told = "".join([caplog.text, *capfd.readouterr(), *traceback.format_exception(caught.value), repr(caught.value.__context__)])
    assert CANARY not in told
    if case in ("500", "401", "429"):
        assert str(caught.value).startswith("no advice from openai/stub: ")


def test_the_run_goes_on_with_the_heuristic_order_and_records_no_secret(server, caplog) -> None:
    broken(server, "401")
    ctx, _ = context(advisor(server))
    with caplog.at_level(logging.INFO):
        (ordered,) = advise.run((RegionPlan(region=region(), summary=SUMMARY, space=SPACE),), (), 0, ctx)
    assert [s.schedule for s in ordered.steps] == list(POINTS) and ordered.record.accepted == Advice()
    assert ordered.record.error.startswith("UsageError: no advice from openai/stub: AuthenticationError; check the model's name")
    assert CANARY not in caplog.text + repr(ordered) + repr(ctx.failures) + "".join(f.traceback for f in ctx.failures)


def test_a_server_that_is_not_there_is_refused_at_once() -> None:
    subject = LiteLLMAdvisor(Settings(model="openai/stub", api_base="http://127.0.0.1:9/v1", timeout_s=20.0))
    began = time.monotonic()
    with pytest.raises(UsageError, match="no advice from openai/stub"):
        subject.advise(QUESTION)
    assert time.monotonic() - began < 10.0


def test_the_budget_of_the_question_shortens_the_deadline_that_a_dripping_server_passes(server) -> None:
    broken(server, "dripping")
    began = time.monotonic()
    with pytest.raises(UsageError, match=r"^no advice from openai/stub: no answer within 1 s"):
        advisor(server, timeout_s=20.0).advise(evolve(QUESTION, budget_s=0.2))
    assert len(server.requests) == 1 and 1.0 <= time.monotonic() - began < 4.0


def test_settings_come_from_the_environment(server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=f"needs a model: set model in .*{MODEL}="):
        LiteLLMAdvisor().advise(QUESTION)
    server.says(GOOD)
    monkeypatch.setenv(MODEL, "openai/stub")
    monkeypatch.setenv("AGENTCOMPILE_LLM_API_BASE", server.base)
    assert LiteLLMAdvisor().advise(QUESTION).order == ("gemv/gemv",)
    assert CANARY not in repr(Settings().with_environment())


def test_a_key_that_changes_between_two_questions_is_the_one_that_is_sent(server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.says(GOOD)
    advisor(server).advise(QUESTION)
    monkeypatch.setenv("OPENAI_API_KEY", f"{CANARY}-renewed")
    advisor(server).advise(QUESTION)
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(UsageError, match=r"AuthenticationError|APIError|InternalServerError"):
        advisor(server).advise(QUESTION)
    assert server.keys == [f"Bearer {CANARY}", f"Bearer {CANARY}-renewed"]


def test_no_address_hides_in_the_name_of_a_model() -> None:
    with pytest.raises(ValueError, match="holds an address"):
        Settings(model="huggingface/https://elsewhere.example/v1")


def test_answers_are_recorded_for_the_replay_advisor(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "advice.json"
    server.says(GOOD)
    advisor(server, record=path).advise(QUESTION)
    monkeypatch.setenv(RECORD, str(path))
    advisor(server).advise(evolve(QUESTION, round=1))
    recorded = json.loads(path.read_text())
    assert recorded == {"schema": 1, "answers": {question_key(QUESTION): GOOD, question_key(evolve(QUESTION, round=1)): GOOD}}
    assert CANARY not in path.read_text() and [p.name for p in tmp_path.iterdir()] == ["advice.json"]


def test_a_file_that_cannot_take_the_answer_is_refused_before_anything_is_asked(server, tmp_path: Path) -> None:
    server.says(GOOD)
    path = tmp_path / "advice.json"
    for text in ("[]", "no json", '{"schema": 99, "answers": {}}', '{"schema": 1}'):
        path.write_text(text)
        with pytest.raises(UsageError, match=f"name another file in {RECORD}"):
            advisor(server, record=path).advise(QUESTION)
    assert server.requests == [] and path.read_text() == '{"schema": 1}'


def test_litellm_stays_out_of_this_process_and_a_lost_child_is_replaced(server) -> None:
    server.says(GOOD)
    advisor(server).advise(QUESTION)
    child = agentcompile_advisor_litellm._asker()._child
    child.kill()
    child.wait()
    assert advisor(server).advise(QUESTION).order == ("gemv/gemv",)
    assert "litellm" not in sys.modules


def test_an_answer_that_repeats_a_key_is_refused_and_not_recorded(server, tmp_path: Path) -> None:
    escaped = "".join(f"\\u{ord(c):04x}" for c in CANARY)
    for text in (json.dumps({**GOOD, "order": [CANARY]}), json.dumps(GOOD)[:-1] + f', "note": "{escaped}"}}'):
        server.says(text)
        with pytest.raises(UsageError, match="repeats a key of this environment") as caught:
            advisor(server, record=tmp_path / "advice.json").advise(QUESTION)
        assert CANARY not in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_refused_and_the_key_goes_nowhere_else(server, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = type(server)()
    elsewhere.says(GOOD)
    thread = threading.Thread(target=elsewhere.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setattr(server.RequestHandlerClass, "location", f"{elsewhere.base}/chat/completions")
    try:
        server.reply = lambda: (status, "{}")
        with pytest.raises(UsageError, match="no advice from openai/stub"):
            advisor(server).advise(QUESTION)
        assert elsewhere.keys == [] and len(server.requests) == 1
    finally:
        elsewhere.shutdown()
        elsewhere.server_close()


def test_without_litellm_one_sentence_says_what_to_install(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "litellm.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))
    agentcompile_advisor_litellm._asker().close()
    with pytest.raises(UsageError, match=r"litellm cannot be used \(ImportError\): pip install"):
        advisor(server).advise(QUESTION)
