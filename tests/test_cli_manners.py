"""The command line refuses before it loads, reads prompts from where they come, and says what every option does."""

import argparse
import io
import json
import sys
from pathlib import Path

import pytest

from agentcompile_core.cli.parser import parser

TINY = Path(__file__).parents[1] / "examples" / "tiny_model"
PROMPT = "When an exception"
GENERATE = ("--max-new-tokens", 6, "--device", "cpu", "--json")


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening any model fails the test."""
    from agentcompile_core.stages.capture import huggingface

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("a model was opened")

    monkeypatch.setattr(huggingface, "load_pretrained", opened)


@pytest.mark.parametrize(("arguments", "words"), [
    (("compile", TINY, "--advisor", "oracle"), "unknown advisor 'oracle'"),
    (("compile", TINY, "--validators", "hope"), "unknown validator 'hope'"),
    (("compile", TINY, "--target", "gtx280"), "unknown target 'gtx280'"),
    (("compile", TINY, "--context", 1), "a context of 1"),
    (("compile", TINY, "--rounds", 0), "must be positive"),
    (("compile", TINY, "--out", TINY), "exists and is not a bundle"),
    (("compile", TINY, "--out", TINY / "config.json" / "b"), "config.json is a file"),
    (("compile", TINY, "--log", "/nowhere/at/all"), "cannot write the log"),
    (("bench", TINY, "--baselines", "magic"), "unknown baseline 'magic'"),
    (("bench", TINY, "--output", 1), "2 new tokens"),
    (("generate", TINY, "--prompt", "x", "--advisor", "oracle"), "unknown advisor 'oracle'"),
    (("generate", TINY, "--prompt", ""), "a prompt of 0 tokens"),
    (("generate", TINY, "--prompt-file", "/nowhere/at/all"), "cannot read the prompt"),
    (("generate", TINY, "--prompt", "x", "--max-new-tokens", 0), "at least 1"),
    (("generate", TINY, "--prompt", "x", "--temperature", 0), "--temperature must be over 0"),
    (("generate", TINY, "--prompt", "x", "--top-p", 1.5), "--top-p must be over 0 and at most 1"),
    (("generate", TINY, "--prompt", "x", "--greedy", "--top-k", 3), "--greedy and --top-k contradict"),
    (("generate", "--prompt", "x"), "needs a model"),
])
def test_bad_arguments_are_refused_before_a_model_is_opened(cli, nothing_is_loaded, arguments: tuple[object, ...], words: str) -> None:
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("agentcompile: ") and words in err and err.count("\n") == 1


def test_a_model_without_a_tokenizer_is_refused_before_it_is_compiled(cli, nothing_is_loaded, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((TINY / "config.json").read_text())
    code, _, err = cli("generate", tmp_path, "--prompt", "x")
    assert code == 2 and "has no tokenizer" in err


def test_the_prompt_comes_from_a_pipe_or_a_file(cli, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cli("generate", "--bundle", tiny_bundle, "--prompt", PROMPT, *GENERATE)
    assert plain[0] == 0, plain[2]
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
    assert cli("generate", "--bundle", tiny_bundle, "--prompt", "-", *GENERATE) == plain
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT + "\n")
    assert cli("generate", "--bundle", tiny_bundle, "--prompt-file", path, *GENERATE) == plain
    path.write_bytes(b"\xff\xfe")
    code, _, err = cli("generate", "--bundle", tiny_bundle, "--prompt-file", path, *GENERATE)
    assert code == 2 and "no UTF-8 text" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, _, err = cli("generate", "--bundle", tiny_bundle, "--prompt", "-", *GENERATE)
    assert code == 2 and "standard input is empty" in err


def test_a_temperature_implies_sampling(cli, tiny_bundle: Path) -> None:
    def text(*options: object) -> str:
        code, out, err = cli("generate", "--bundle", tiny_bundle, "--prompt", PROMPT, *GENERATE, *options)
        assert code == 0, err
        return str(json.loads(out)["text"])

    drawn = text("--temperature", 2.5, "--seed", 3)
    assert drawn == text("--sample", "--temperature", 2.5, "--seed", 3) != text()


def test_there_is_a_line_before_the_model_is_there(cli, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("raise RuntimeError('while it was loaded')\n")
    code, _, err = cli("compile", tmp_path / "module.py", "--device", "cpu")
    lines = err.splitlines()
    assert code and lines[0].endswith("module.py is executed") and lines[1].endswith("s] load ...") and "while it was loaded" in lines[2]


def test_random_weights_are_announced(cli, tmp_path: Path) -> None:
    config = json.loads((TINY / "config.json").read_text()) | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = cli("compile", tmp_path, "--device", "cpu", "--context", 64, "--budget-plans", 1, "--rounds", 1, "--budget-s", 0.01,
                       "--no-cache")
    assert code == 0, err
    assert f"note: no weights in {tmp_path}: random weights, seed 0" in err


def commands() -> dict[str, argparse.ArgumentParser]:
    return next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)).choices


@pytest.mark.parametrize("name", commands())
def test_every_option_has_help_with_its_default_and_every_command_an_example(name: str) -> None:
    sub = commands()[name]
    assert sub.epilog and f"agentcompile {name}" in sub.epilog
    for action in sub._actions:
        assert action.help, f"{name} {action.dest} has no help"
        if action.default not in (None, False, argparse.SUPPRESS) and action.option_strings:
            shown = f"{action.default:g}" if isinstance(action.default, float) else str(action.default)
            assert f"default: {shown}" in action.help, f"{name} {action.dest} hides its default"


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_shells_complete(cli, shell: str) -> None:
    code, out, err = cli("completion", shell)
    assert code == 0, err
    assert "compile" in out and "budget-plans" in out


def test_completion_without_its_package_says_what_to_install(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, out, err = cli("completion", "bash")
    assert (code, out) == (2, "")
    assert "agentcompile-core[completion]" in err
