"""benchmarks/survey.py: which models are left to measure, and that one that fails, or takes too long, ends no other."""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FAKE = """import sys, time
name = sys.argv[1]
if name == "qwen3-4b":
    sys.exit("no memory")
if name == "gemma-2-2b":
    time.sleep(60)
print("  agentcompile:  1.0 ms of", name, "on", __import__("os").environ["CUDA_VISIBLE_DEVICES"])
"""


@pytest.fixture
def survey(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("survey")
    for name in ("survey", "harness"):
        sys.modules.pop(name, None)


def rows(path: Path, *names: str, commit: str) -> None:
    path.write_text(json.dumps({"rows": [{"model": name, "system": "agentcompile", "commit": commit} for name in names]}))


def test_models_of_this_commit_are_not_measured_again_and_the_largest_come_first(survey: Any, tmp_path: Path) -> None:
    rows(tmp_path / "decode_bf16.json", "qwen3-1.7b", commit="now")
    names = ["llama-3.2-1b", "qwen3-1.7b", "qwen3-4b"]
    assert survey.chosen(names, "bfloat16", tmp_path, "now") == ["qwen3-4b", "llama-3.2-1b"]
    assert survey.chosen(names, "bfloat16", tmp_path, "later") == ["qwen3-4b", "qwen3-1.7b", "llama-3.2-1b"]
    assert survey.chosen(names, "float16", tmp_path, "now") == ["qwen3-4b", "qwen3-1.7b", "llama-3.2-1b"]
    assert survey.chosen(["qwen2.5-vl-3b", "qwen3-4b"], "float16", tmp_path, "now") == ["qwen3-4b", "qwen2.5-vl-3b"], "one with images"
    with pytest.raises(SystemExit, match=r"frob is no model of benchmarks/configs; there are .*llama-3\.2-1b"):
        survey.chosen(["frob"], "bfloat16", tmp_path, "now")


def test_one_that_fails_or_takes_too_long_ends_no_other(survey: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "decode.py").write_text(FAKE)
    monkeypatch.setattr(survey, "ROOT", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    options = argparse.Namespace(gpus=2, seconds=60.0, model_seconds=2.0, needs_seconds=1.0, logs=tmp_path / "logs", commit="c",
                                 out=tmp_path)
    found = survey.Survey(["qwen3-4b", "gemma-2-2b", "llama-3.2-1b", "qwen3-1.7b"], options, [])
    assert found.run() == [] and sorted(found.failed) == ["gemma-2-2b", "qwen3-4b"]
    printed = capsys.readouterr().out
    assert "qwen3-4b: no memory" in printed and "gemma-2-2b: took longer than 2 s" in printed
    assert "1.0 ms of qwen3-1.7b on 5" in printed or "1.0 ms of qwen3-1.7b on 7" in printed
    assert (tmp_path / "logs" / "qwen3-4b.log").read_text() == "no memory\n"


def test_none_is_begun_that_has_no_time(survey: Any, tmp_path: Path) -> None:
    options = argparse.Namespace(gpus=1, seconds=5.0, model_seconds=2.0, needs_seconds=6.0, logs=None, commit="c", out=tmp_path)
    found = survey.Survey(["qwen3-4b"], options, [])
    assert found.run() == ["qwen3-4b"] and not found.failed


@pytest.mark.parametrize("name", ["qwen3-1.7b", "gpt2-xl", "gemma-3-4b"])
def test_a_context_is_at_most_what_the_model_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    full_models = importlib.import_module("full_models")
    assert full_models.context_of(name, 1 << 40) == {"qwen3-1.7b": 40960, "gpt2-xl": 1024, "gemma-3-4b": 131072}[name]
    assert full_models.context_of(name, 128) == 128
    for module in ("full_models", "harness"):
        sys.modules.pop(module, None)
