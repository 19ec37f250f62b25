"""Advisors are swapped by three lines of toml, or a variable: an LLM's answers, their replay, nobody."""

import importlib.util
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("shared_captures")
CANARY = "sk-canary-0f-th3-c0mmand-l1ne"
ANSWER = {"label": "gather", "order": ["elementwise/gather", "cublas/cublas"], "cover_order": [0], "hints": [], "risks": ["misaligned"],
          "diagnoses": []}
# Families, and no backend: nothing is built, which keeps this short.
PLUGINS = ("litellm", "replay", "random", "transformers_rules", "cuda", "elementwise", "norm")

for package in ("litellm", "agentcompile_advisor_litellm", "agentcompile_advisor_replay", "agentcompile_advisor_random"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)


@pytest.fixture
def server() -> Iterator:
    """The stub of an OpenAI-compatible server that the litellm advisor's own tests use."""
    path = ROOT / "plugins" / "advisors" / "litellm" / "tests" / "conftest.py"
    spec = importlib.util.spec_from_file_location("litellm_stub", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stub = module.Server()
    threading.Thread(target=stub.serve_forever, args=(0.02,), daemon=True).start()
    stub.says(ANSWER)
    yield stub
    stub.shutdown()
    stub.server_close()


@pytest.fixture
def compiled(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict]:
    """Statistics of ``agentcompile compile`` of the tiny model, run in ``tmp_path``, whose agentcompile.toml names the advisor.

    In this process: the advisor's requests leave from a child of its own anyway, and imports were most of the time.
    """
    for name in (*os.environ, "AGENTCOMPILE_STRICT"):
        if name.upper().endswith("_PROXY") or name == "AGENTCOMPILE_STRICT":
            monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def run(**environment: str) -> dict:
        with monkeypatch.context() as patch:
            ours = {"AGENTCOMPILE_PLUGINS": ",".join(PLUGINS), "OPENAI_API_KEY": CANARY, "NO_PROXY": "127.0.0.1", "AGENTCOMPILE_CONFIG": ""}
            for name, value in {**ours, **environment}.items():
                patch.setenv(name, value)
            # Nothing is built: the budget is for a busy machine to start litellm in.
            code, out, err = cli("compile", ROOT / "examples" / "tiny_model", "--no-cache", "--device", "cpu", "--dtype", "float32",
                                 "--context", 64, "--rounds", 1, "--budget-plans", 20, "--budget-s", 240, "--json")
        assert code == 0, err[-2000:]
        assert CANARY not in out + err
        return json.loads(out)["statistics"]

    return run


@pytest.mark.slow
def test_an_llm_is_asked_once_per_region_and_its_answers_can_be_replayed(server, compiled, tmp_path: Path) -> None:
    recorded = tmp_path / "advice.json"
    mine = tmp_path / "mine.toml"  # what only the user's own file may set
    mine.write_text(f'[plugin.litellm]\napi_base = "{server.base}"\nrecord = "advice.json"\n')
    project = tmp_path / "agentcompile.toml"
    project.write_text('advisor = "litellm"\n[plugin.litellm]\nmodel = "openai/stub"\n')
    statistics = compiled(AGENTCOMPILE_CONFIG=str(mine))
    answers = json.loads(recorded.read_text())["answers"]
    assert len(server.requests) == len(answers) == statistics["advised"] >= 2
    assert all(answer == ANSWER for answer in answers.values()) and CANARY not in recorded.read_text()
    assert len({request["messages"][1]["content"] for request in server.requests}) == len(server.requests)
    project.write_text('advisor = "replay"\n[plugin.replay]\nfile = "advice.json"\n')
    replayed = compiled()
    assert replayed["advised"] == statistics["advised"] and len(server.requests) == len(answers)
    assert {k: v for k, v in replayed.items() if k != "seconds"} == {k: v for k, v in statistics.items() if k != "seconds"}


def test_an_advisor_that_is_not_set_up_costs_its_advice_only(compiled) -> None:
    statistics = compiled(AGENTCOMPILE_LLM="", AGENTCOMPILE_ADVISOR="litellm")
    assert statistics["advised"] == 0 and statistics["failures"] >= 1 and statistics["lowered"] > 0
