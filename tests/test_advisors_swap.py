"""Advisors are swapped by three lines of toml, or a variable: an LLM's answers, their replay, nobody."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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


def compiled(folder: Path, **environment: str) -> dict:
    """Statistics of ``agentcompile compile`` of the tiny model, run in ``folder``, whose agentcompile.toml names the advisor."""
    model = str(ROOT / "examples" / "tiny_model")  # nothing is built: the budget is for a busy machine to start litellm in
    command = [sys.executable, "-m", "agentcompile_core.cli", "compile", model, "--no-cache", "--device", "cpu", "--dtype", "float32",
               "--context", "64", "--rounds", "1", "--budget-plans", "20", "--budget-s", "240"]
    clean = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY") and name != "AGENTCOMPILE_STRICT"}
    environment = {**clean, "AGENTCOMPILE_PLUGINS": ",".join(PLUGINS), "OPENAI_API_KEY": CANARY, "NO_PROXY": "127.0.0.1",
                   "PYTHONPATH": str(ROOT), "AGENTCOMPILE_CONFIG": "", **environment}
    done = subprocess.run([*command, "--json"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert CANARY not in done.stdout + done.stderr
    return json.loads(done.stdout)["statistics"]


def test_an_llm_is_asked_once_per_region_and_its_answers_can_be_replayed(server, tmp_path: Path) -> None:
    recorded = tmp_path / "advice.json"
    mine = tmp_path / "mine.toml"  # what only the user's own file may set
    mine.write_text(f'[plugin.litellm]\napi_base = "{server.base}"\nrecord = "advice.json"\n')
    project = tmp_path / "agentcompile.toml"
    project.write_text('advisor = "litellm"\n[plugin.litellm]\nmodel = "openai/stub"\n')
    statistics = compiled(tmp_path, AGENTCOMPILE_CONFIG=str(mine))
    answers = json.loads(recorded.read_text())["answers"]
    assert len(server.requests) == len(answers) == statistics["advised"] >= 2
    assert all(answer == ANSWER for answer in answers.values()) and CANARY not in recorded.read_text()
    assert len({request["messages"][1]["content"] for request in server.requests}) == len(server.requests)
    project.write_text('advisor = "replay"\n[plugin.replay]\nfile = "advice.json"\n')
    replayed = compiled(tmp_path)
    assert replayed["advised"] == statistics["advised"] and len(server.requests) == len(answers)
    assert {k: v for k, v in replayed.items() if k != "seconds"} == {k: v for k, v in statistics.items() if k != "seconds"}


def test_an_advisor_that_is_not_set_up_costs_its_advice_only(tmp_path: Path) -> None:
    statistics = compiled(tmp_path, AGENTCOMPILE_LLM="", AGENTCOMPILE_ADVISOR="litellm")
    assert statistics["advised"] == 0 and statistics["failures"] >= 1 and statistics["lowered"] > 0
